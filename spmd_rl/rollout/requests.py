"""What is asked of the engine, and what comes back."""

from dataclasses import dataclass

import torch

from spmd_rl.data.sampling_params import SamplingParams

__all__ = ["Completion", "Request", "SamplingParams"]


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    id: int
    prompt: tuple[int, ...]
    """Token ids."""
    seed: int


@dataclass(frozen=True)
class Completion:
    """One generated sample."""

    id: int
    prompt: torch.Tensor
    """Token ids [P], int64."""
    response: torch.Tensor
    """Token ids [R], int64, the end token included when it was drawn."""
    logprobs: torch.Tensor
    """Natural logs, fp32, of the distribution each response token was drawn from [R]."""
    finish_reason: str
    """`stop` or `length`."""
    cached_prompt_tokens: int
