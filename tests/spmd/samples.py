"""Samples with fixed contents, the same in every process."""

import math
from collections.abc import Iterable

import torch

from spmd_rl.data.tickets import Ticket
from spmd_rl.training.packing import TrainSample

PROMPTS, SAMPLES = 3, 4


def make_samples(vocabulary: int) -> tuple[dict[int, TrainSample], list[Ticket]]:
    """Three prompts of different lengths with four responses each, of 1 to 13 tokens."""
    draw = torch.Generator().manual_seed(3)
    samples, tickets = {}, []
    for prompt in range(PROMPTS):
        tokens = torch.randint(3, vocabulary, (5 + 4 * prompt,), generator=draw)
        for index in range(SAMPLES):
            length = int(torch.randint(1, 14, (1,), generator=draw))
            name = prompt * SAMPLES + index
            response = torch.randint(3, vocabulary, (length,), generator=draw)
            samples[name] = TrainSample(name, tokens, response, torch.randn(length, generator=draw) - 6)
            tickets.append(Ticket(name, prompt, len(tokens), length, length, "stop"))
    return samples, tickets


def advantages_of(samples: Iterable[int]) -> dict[int, float]:
    return {name: math.sin(1.0 + name) for name in samples}


def perturb(samples: Iterable[TrainSample]) -> None:
    """Move the log-probabilities before the update, so that ratios, clipping and KL all have something to say."""
    for sample in samples:
        if sample.policy_logprobs is not None:
            moved = torch.sin(torch.arange(len(sample.response)) + sample.id)
            sample.policy_logprobs = sample.policy_logprobs + 0.4 * moved
            if sample.reference_logprobs is not None:
                sample.reference_logprobs = sample.reference_logprobs - 0.3 * moved
