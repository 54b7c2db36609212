"""Samples with fixed contents, the same in every process."""

import math
from collections.abc import Iterable

import torch

from spmd_rl.data.tickets import Ticket
from spmd_rl.distributed.sample import Sample
from spmd_rl.models.blocks import Vision
from spmd_rl.models.qwen2_5_vl import positions

PROMPTS, SAMPLES = 3, 4
GRIDS = ([(1, 4, 8), (1, 6, 4)], [(1, 10, 4)], [])
"""Of each prompt's images; some are larger than a window of the tower."""


def show_images(
    tokens: torch.Tensor, grids: list[tuple[int, int, int]], vision: Vision, draw: torch.Generator
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Put random images behind a prompt's third token; returns the prompt and what its samples have beside tokens."""
    parts, counts = [tokens[:3]], [math.prod(grid) // vision.merge**2 for grid in grids]
    for count in counts:
        image = torch.full((count,), vision.image_token)
        parts += [torch.tensor([510]), image, torch.tensor([511])]
    tokens = torch.cat([*parts, tokens[3:]])
    fields = {
        "positions": torch.tensor(positions(tokens.tolist(), grids, vision)),
        "image_places": (tokens == vision.image_token).nonzero()[:, 0],
        "image_grids": torch.tensor(grids),
        "pixel_values": torch.randn(sum(map(math.prod, grids)), vision.patch_elements, generator=draw),
    }
    return tokens, fields


def image_prompts(vision: Vision) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Prompts with two images, one and none, and what their samples have beside tokens.

    Then the second one's tokens with another image, and with its patches in another shape; then one image twice.
    """
    draw, found = torch.Generator().manual_seed(5), []
    for number, grids in enumerate(GRIDS):
        tokens = torch.randint(3, 500, (5 + 2 * number,), generator=draw)
        found.append(show_images(tokens, grids, vision, draw) if grids else (tokens, {}))
    tokens, fields = found[1]
    [(frames, rows, columns)] = GRIDS[1]
    found.append((tokens, fields | {"pixel_values": -fields["pixel_values"]}))
    turned = [(frames, columns, rows)]
    where = torch.tensor(positions(tokens.tolist(), turned, vision))
    found.append((tokens, fields | {"image_grids": torch.tensor(turned), "positions": where}))
    tokens, fields = show_images(tokens[:3], GRIDS[0][:1] * 2, vision, draw)
    half = fields["pixel_values"].chunk(2)[0]
    return [*found, (tokens, fields | {"pixel_values": torch.cat([half, half])})]


def make_samples(vocabulary: int, vision: Vision | None = None) -> tuple[dict[int, Sample], list[Ticket]]:
    """Three prompts of different lengths with four responses each, of 1 to 13 tokens; in some a span is masked.

    `vision`: the first prompt shows two images, the second one, the third none.
    """
    draw = torch.Generator().manual_seed(3)
    samples, tickets = {}, []
    for prompt in range(PROMPTS):
        tokens = torch.randint(3, 500 if vision else vocabulary, (5 + 4 * prompt,), generator=draw)
        shown = {}
        if vision is not None and GRIDS[prompt]:
            tokens, shown = show_images(tokens, GRIDS[prompt], vision, draw)
        for index in range(SAMPLES):
            length = int(torch.randint(1, 14, (1,), generator=draw))
            name = prompt * SAMPLES + index
            response = torch.randint(3, vocabulary, (length,), generator=draw)
            mask = torch.ones(length, dtype=torch.bool)
            mask[2:5] = name % 3 != 1
            samples[name] = Sample.of(name, tokens, response, rollout_logprobs=torch.randn(length, generator=draw) - 6)
            samples[name].loss_mask = mask
            samples[name].fields |= shown
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
    """Return what an optimizer step sums over this rank's loss tokens; nothing where it does not report."""
    return learned.sums[0] if learned.sums else {}
