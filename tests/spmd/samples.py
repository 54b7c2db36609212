"""Samples with fixed contents, the same in every process."""

import math
from collections.abc import Iterable

import torch

from spmd_rl.data.tickets import Ticket
from spmd_rl.distributed.sample import Sample

PROMPTS, SAMPLES = 3, 4


def make_samples(vocabulary: int) -> tuple[dict[int, Sample], list[Ticket]]:
    """Three prompts of different lengths with four responses each, of 1 to 13 tokens; in some a span is masked."""
    draw = torch.Generator().manual_seed(3)
    samples, tickets = {}, []
    for prompt in range(PROMPTS):
        tokens = torch.randint(3, vocabulary, (5 + 4 * prompt,), generator=draw)
        for index in range(SAMPLES):
            length = int(torch.randint(1, 14, (1,), generator=draw))
            name = prompt * SAMPLES + index
            response = torch.randint(3, vocabulary, (length,), generator=draw)
            mask = torch.ones(length, dtype=torch.bool)
            mask[2:5] = name % 3 != 1
            samples[name] = Sample.of(name, tokens, response, rollout_logprobs=torch.randn(length, generator=draw) - 6)
            samples[name].loss_mask = mask
            tickets.append(Ticket(name, prompt, len(tokens), length, int(mask.sum()), "stop"))
    return samples, tickets


def advantages_of(samples: Iterable[int]) -> dict[int, float]:
    return {name: math.sin(1.0 + name) for name in samples}


def put_what_is_learned(samples: dict[int, Sample]) -> None:
    """Give each sample its advantage, and its tokens their weight in the mean over all of them."""
    advantages, total = advantages_of(samples), sum(sample.loss_tokens for sample in samples.values())
    for name, sample in samples.items():
        sample.put("advantages", advantages[name])
        sample.put("weights", 1.0 / total)


def perturb(samples: Iterable[Sample]) -> None:
    """Move the log-probabilities before the update, so that ratios, clipping and KL all have something to say."""
    for sample in samples:
        moved = torch.sin(torch.arange(len(sample.response)) + sample.id)
        for name, factor in (("policy_logprobs", 0.4), ("reference_logprobs", -0.3)):
            if name in sample.fields:
                sample.fields[name] = sample.fields[name] + factor * moved


def own_sums(learned) -> dict[str, float]:
    """What an optimizer step sums over this rank's loss tokens; nothing where it does not report."""
    return learned.sums[0] if learned.sums else {}
