"""The weight of the KL penalty over a run: fixed, or led to a target."""

import math
from dataclasses import dataclass

from spmd_rl.config.check_critic import MOST_KL_ERROR


@dataclass
class KlController:
    """Hold beta, the weight that the next step's token rewards take.

    Adaptive (https://arxiv.org/abs/1909.08593, section 2.2), where there is a target: beta *= 1 + error *
    samples / horizon, with error = clip(kl / target - 1, -0.2, 0.2). Departure: the paper's KL is a sum over a
    response, this one its mean over tokens, so that the target does not depend on how long responses are.
    """

    beta: float
    target: float | None = None
    """None: beta is fixed."""
    horizon: float = 1.0
    """Samples over which beta moves by the error."""

    def update(self, kl: float, samples: int) -> None:
        """Take note of a step: the mean over its samples of each one's mean KL a token. It acts from the next step on.

        A KL that is not finite says nothing, and changes nothing.
        """
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -MOST_KL_ERROR), MOST_KL_ERROR)
            self.beta *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps; nothing of a fixed one, whose beta is a setting."""
        return {} if self.target is None else {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` said."""
        if self.target is not None:
            self.beta = state.get("beta", self.beta)
