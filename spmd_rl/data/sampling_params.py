"""Settings of drawing tokens: rank 0 sends them, every engine uses them."""

from dataclasses import dataclass
from typing import Self

from spmd_rl.config.rollout_config import RolloutConfig


@dataclass(frozen=True)
class SamplingParams:
    """Settings of drawing tokens; the same for all requests of a rollout."""

    temperature: float
    """0: greedy."""
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """As training draws."""
        return cls(
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_length,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )
