"""The samples of one step on the ranks that hold them, and how they travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tickets import SampleReward
from spmd_rl.rollout.requests import Completion

if TYPE_CHECKING:  # what only generates keeps samples too, and needs nothing of training
    from spmd_rl.training.packing import TrainSample


class SampleStore:
    """Completions on the rank that generated them, training samples on the ranks that train on them."""

    def __init__(self) -> None:
        self.made: dict[int, Completion] = {}
        self.texts: dict[int, str] = {}
        self.prompts: dict[int, Prompt] = {}
        self.scored: dict[int, SampleReward] = {}
        self.training: dict[int, TrainSample] = {}
        self.read: dict[int, tuple[int, torch.Tensor]] = {}
        """Sample -> its tokens as a reward model reads them [L], after so many that its prompt's samples share."""

    def forget(self) -> None:
        self.made.clear()
        self.texts.clear()
        self.prompts.clear()
        self.scored.clear()
        self.training.clear()
        self.read.clear()


def to_wire(completions: Iterable[Completion]) -> torch.Tensor:
    """Samples as one int32 tensor: id, lengths, prompt, response and the bits of the log-probabilities of each."""
    parts = [torch.empty(0, dtype=torch.int32)]
    for made in completions:
        header = torch.tensor([made.id, len(made.prompt), len(made.response)], dtype=torch.int32)
        parts += [header, made.prompt.int(), made.response.int(), made.logprobs.view(torch.int32)]
    return torch.cat(parts)


def from_wire(wire: torch.Tensor) -> list[TrainSample]:
    """The samples of one sender."""
    from spmd_rl.training.packing import TrainSample

    samples = []
    at = 0
    while at < len(wire):
        sample, prompt, response = wire[at : at + 3].tolist()
        tokens = wire[at + 3 : at + 3 + prompt + response]
        at += 3 + prompt + 2 * response
        samples.append(
            TrainSample(
                id=sample,
                prompt=tokens[:prompt].long(),
                response=tokens[prompt:].long(),
                rollout_logprobs=wire[at - response : at].clone().view(torch.float32),
            )
        )
    return samples


def read_to_wire(read: Iterable[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """(sample, shared tokens, tokens) of each as one int32 tensor: id, shared, length, tokens."""
    parts = [torch.empty(0, dtype=torch.int32)]
    for sample, shared, tokens in read:
        parts += [torch.tensor([sample, shared, len(tokens)], dtype=torch.int32), tokens.int()]
    return torch.cat(parts)


def read_from_wire(wire: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    """What one sender has read."""
    found = []
    at = 0
    while at < len(wire):
        sample, shared, length = wire[at : at + 3].tolist()
        found.append((sample, shared, wire[at + 3 : at + 3 + length].long()))
        at += 3 + length
    return found
