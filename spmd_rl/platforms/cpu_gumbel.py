"""Draw tokens as vLLM's kernel for CPUs does, to the last bit, and look at no logarithm of a token that cannot win.

A token is the one whose logit plus Gumbel noise is largest. The noise of a token is -log(-log u), where u comes from 53
bits that SplitMix64 makes of the row's seed and the token. Two logarithms for each token of the vocabulary take longer
than all else that sampling does; how large u must be for one to win is known for a whole block from its largest logit.
"""

import ctypes
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

BLOCK = 64
"""Tokens that share a bound. Of the blocks of a row, one or two hold a token that passes it."""
_WORTH = 1 << 20
"""Logits of a call from which on compiling pays, which takes about a second once in a process."""
_LARGEST = 37.5
"""No noise is larger: u is at most 1 - 2^-54."""
_STEPS = 1 << 53
"""Values that u can have."""


Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits of rows and a seed for each -> a token for each."""


def draw(original: Draw) -> Draw:
    """Return vLLM's `fused_gumbel_argmax`, faster where the vocabulary is large."""

    def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        if logits.numel() < _WORTH and not _compiled.cache_info().currsize:
            return original(logits, seeds)
        return drawn(logits, seeds)

    return fused_gumbel_argmax


def drawn(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Return a token for each row of logits [rows, vocabulary] in float32, by its seed [rows]."""
    logits, seeds = logits.contiguous(), seeds.contiguous()
    assert logits.dtype == torch.float32 and seeds.dtype == torch.int64
    rows, vocabulary = logits.shape
    blocks = vocabulary // BLOCK
    largest = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(2)
    tokens = torch.empty(rows, dtype=torch.int64)
    _compiled()(*(one.data_ptr() for one in (logits, largest, seeds, tokens)), rows, vocabulary)
    return tokens


@lru_cache
def _compiled() -> Callable[..., None]:
    """Return the loop over rows. It takes addresses and sizes, and trusts them."""
    from numba import carray, cfunc, types

    gamma, first_factor, second_factor = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    eleven, twenty_seven, thirty, thirty_one = map(np.uint64, (11, 27, 30, 31))

    def draw_rows(logits, largest, seeds, tokens, rows, vocabulary):
        whole = vocabulary // BLOCK
        table, tops = carray(logits, (rows, vocabulary)), carray(largest, (rows, whole))
        keys, found = carray(seeds, (rows,)), carray(tokens, (rows,))
        for r in range(rows):
            row, key = table[r], np.uint64(keys[r])
            key = (key ^ (key >> thirty)) * first_factor
            key = (key ^ (key >> twenty_seven)) * second_factor
            key = key ^ (key >> thirty_one)
            first = 0
            while first < vocabulary and row[first] == -np.inf:
                first += 1
            if first == vocabulary:
                found[r] = 0
                continue
            # The best token, its logit and its noise: none yet, which any token beats.
            best, logit, noise = 0, 0.0, -np.inf
            for start in range(first - first % BLOCK, vocabulary, BLOCK):
                end = min(start + BLOCK, vocabulary)
                if end - start == BLOCK:
                    top = tops[r, start // BLOCK]
                else:
                    top = row[start]
                    for i in range(start + 1, end):
                        top = max(top, row[i])
                needed = noise - (float(top) - logit) - 1e-9
                if needed >= _LARGEST:
                    continue
                # How many of the values of u, from the largest down, are enough; rounded up.
                enough = -math.expm1(-math.exp(-needed)) * (1 + 1e-9) * _STEPS + 2.0
                limit = _STEPS - int(min(enough, float(_STEPS)))
                passed = 0
                begin = key + np.uint64(start + 1) * gamma
                for i in range(end - start):
                    z = begin + np.uint64(i) * gamma
                    z = (z ^ (z >> thirty)) * first_factor
                    z = (z ^ (z >> twenty_seven)) * second_factor
                    z = z ^ (z >> thirty_one)
                    passed += types.int64(z >> eleven) >= limit
                if not passed:
                    continue
                for i in range(max(start, first), end):
                    more = float(row[i]) - logit
                    if more + _LARGEST > noise:
                        z = key + np.uint64(i + 1) * gamma
                        z = (z ^ (z >> thirty)) * first_factor
                        z = (z ^ (z >> twenty_seven)) * second_factor
                        z = z ^ (z >> thirty_one)
                        g = -math.log(-math.log((float(z >> eleven) + 0.5) * 2.0**-53))
                        if more + g > noise:
                            best, logit, noise = i, float(row[i]), g
            found[r] = best

    number = types.int64
    floats, numbers = types.CPointer(types.float32), types.CPointer(number)
    made = cfunc(types.void(floats, floats, numbers, numbers, number, number))(draw_rows)
    address = ctypes.c_void_p
    call = ctypes.CFUNCTYPE(None, *[address] * 4, ctypes.c_int64, ctypes.c_int64)(made.address)
    call.made = made  # whose machine code it is
    return call
