"""Requests to the engine, and their completions."""

from dataclasses import dataclass

from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.distributed.sample import Sample

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
    """One generated sample, and why it ended."""

    sample: Sample
    """The end token included when it was drawn; its field rollout_logprobs: natural logs [R], fp32, of the distribution
    that each response token was drawn from."""
    finish_reason: str
    """`stop` or `length`."""
    cached_prompt_tokens: int
