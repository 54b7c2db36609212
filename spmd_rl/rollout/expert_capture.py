"""Hear from vLLM which experts it chose for each token of a request, in the process that runs it.

vLLM's own way (`enable_return_routed_experts`) is for accelerators; this one reads the routers where there is none. A
prompt's tokens that were in the cache have what was chosen when they were computed: blocks of tokens are found again by
all that comes before them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

_UNKNOWN = -1


@dataclass
class _Request:
    keys: list[bytes]
    """Of each whole block of the prompt."""
    prompt_tokens: int
    longest: int
    experts: np.ndarray | None = None
    """[positions, layers, k]."""


class ExpertCapture:
    """Keep what the routers of an engine's model choose, by request and position."""

    def __init__(self, runner: Any, layers: int, block_tokens: int):
        """`runner`: vLLM's, which has the model and says which tokens it computes. `layers`: of the model."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner, self._layers, self._block = runner, layers, block_tokens
        self._requests: dict[str, _Request] = {}
        self._blocks: dict[bytes, np.ndarray] = {}
        """By all tokens up to its end, the experts of a block."""
        experts = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        self._sparse = [module.layer_id for module in experts]
        for module in experts:
            module.router.set_capture_fn(partial(self._saw, module.layer_id))

    def begin(self, request: str, prompt: Sequence[int], longest: int) -> None:
        """Expect a request of at most so many tokens."""
        self._requests[request] = _Request(self._keys(prompt), len(prompt), longest)

    def end(self, name: str, tokens: int) -> torch.Tensor:
        """Return the experts of a request's first tokens [tokens, layers, k], int16; 0 in layers without any."""
        request = self._requests.pop(name)
        assert request.experts is not None, f"no token of request {name} was computed"
        found = request.experts[:tokens]
        for number, key in enumerate(request.keys):
            block = found[number * self._block : (number + 1) * self._block]
            if (block == _UNKNOWN).any():  # it was in the cache
                block[:] = self._blocks[key][: len(block)]
        assert (found != _UNKNOWN).all(), f"request {name}: tokens without experts"
        return torch.from_numpy(found.copy())

    def forget_cache(self) -> None:
        """Forget the blocks: the weights are others, and the engine's cache is empty too."""
        self._blocks.clear()

    def _saw(self, layer: int, chosen: torch.Tensor) -> None:
        """chosen [tokens of a step, k]."""
        batch, ends = self._runner.input_batch, self._runner.query_start_loc.np
        for number, name in enumerate(batch.req_ids):
            # vLLM adds to the name that it was given.
            request = self._requests.get(name) or self._requests.get(name.rpartition("-")[0])
            if request is None:
                continue
            if request.experts is None:
                request.experts = np.zeros((request.longest, self._layers, chosen.shape[1]), dtype=np.int16)
                request.experts[:, self._sparse] = _UNKNOWN
            first, last = int(ends[number]), int(ends[number + 1])
            start = int(batch.num_computed_tokens_cpu[number])
            request.experts[start : start + last - first, layer] = chosen[first:last].numpy()
            if layer == self._sparse[-1] and start < request.prompt_tokens:
                self._keep_blocks(request, request.experts, start + last - first)

    def _keep_blocks(self, request: _Request, experts: np.ndarray, computed: int) -> None:
        for number, key in enumerate(request.keys[: computed // self._block]):
            block = experts[number * self._block : (number + 1) * self._block]
            if key not in self._blocks and (block != _UNKNOWN).all():
                self._blocks[key] = block.copy()

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Return what each whole block of a prompt is found by."""
        digest, found = hashlib.blake2b(digest_size=16), []
        for at in range(0, len(prompt) - self._block + 1, self._block):
            digest.update(np.array(prompt[at : at + self._block], dtype=np.int64).tobytes())
            found.append(digest.digest())
        return found
