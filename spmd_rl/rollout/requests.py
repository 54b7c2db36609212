"""Requests to the engine, and their completions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.distributed.sample import Sample

__all__ = ["Completion", "PromptImages", "Request", "SamplingParams"]


@dataclass(frozen=True)
class PromptImages:
    """Hold the images of a prompt, as a vision tower takes them."""

    pixels: torch.Tensor
    """Patches of all images, one after another [patches, numbers of a patch]."""
    grids: Sequence[tuple[int, int, int]]
    """Of each image: frames, rows and columns of patches."""
    spans: Sequence[tuple[int, int]]
    """Of each image: its first image token in the prompt, and how many there are."""
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of a sample that shows them, for training."""

    @cached_property
    def of_each(self) -> list[torch.Tensor]:
        """Return the patches of each image."""
        return list(self.pixels.split([frames * rows * columns for frames, rows, columns in self.grids]))

    @cached_property
    def digests(self) -> list[str]:
        """Return of each image what tells it from others: two of one colour may differ in their shape alone."""
        return [
            hashlib.blake2b(repr(tuple(grid)).encode() + one.numpy().tobytes(), digest_size=16).hexdigest()
            for grid, one in zip(self.grids, self.of_each, strict=True)
        ]


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    id: int
    prompt: tuple[int, ...]
    """Token ids."""
    seed: int
    images: PromptImages | None = None


@dataclass(frozen=True)
class Completion:
    """One generated sample, and why it ended."""

    sample: Sample
    """The end token included when it was drawn; its field rollout_logprobs: natural logs [R], fp32, of the distribution
    that each response token was drawn from."""
    finish_reason: str
    """`stop` or `length`."""
    cached_prompt_tokens: int
