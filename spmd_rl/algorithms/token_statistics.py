"""Sum up for rank 0 the numbers that stay on the ranks: how many, their mean, squares and extremes; no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spmd_rl.algorithms.score_normalization import Moments

WHITENING_EPSILON = 1e-8
"""Added to the variance."""


GAE_SPREADS = ("advantages", "returns", "values", "rewards", "kl")
"""By token, by token, by token, by sample, by sample."""


@dataclass(frozen=True)
class Spread:
    """Hold the moments of numbers, the least and the most of them."""

    moments: Moments = Moments()
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, told: Sequence[float]) -> "Spread":
        """Return what a rank told: count, mean, sum of squared distances from it, least and most."""
        count, mean, squares, least, most = told
        return cls(Moments(int(count), mean, squares), least, most)

    def join(self, other: "Spread") -> "Spread":
        """Return the spread of both together."""
        least, most = min(self.least, other.least), max(self.most, other.most)
        return Spread(self.moments.joined(other.moments), least, most)

    def metrics(self, name: str) -> dict[str, float]:
        """Return mean, maximum and minimum under a name; nothing where there are no numbers."""
        if not self.moments.count:
            return {}
        return {f"{name}/mean": self.moments.mean, f"{name}/max": self.most, f"{name}/min": self.least}

    def shifted(self, mean: float, scale: float) -> "Spread":
        """Return the spread of (number - mean) * scale."""
        count, at, squares = self.moments.count, self.moments.mean, self.moments.squares
        moments = Moments(count, (at - mean) * scale, squares * scale**2)
        return Spread(moments, (self.least - mean) * scale, (self.most - mean) * scale)


def joined(parts: Iterable[Spread]) -> Spread:
    """Return the spread of all numbers of the parts."""
    whole = Spread()
    for part in parts:
        whole = whole.join(part)
    return whole


def whitening(moments: Moments) -> tuple[float, float]:
    """Return (mean, scale) such that (number - mean) * scale has mean 0 and variance 1.

    scale = 1 / sqrt(variance + 1e-8), the variance with n - 1; that of one number is 0.
    """
    variance = moments.squares / (moments.count - 1) if moments.count > 1 else 0.0
    return moments.mean, 1.0 / math.sqrt(variance + WHITENING_EPSILON)


def gae_metrics(found: Mapping[str, Spread], clipped: Spread | None = None) -> dict[str, float]:
    """Return the metrics of what was found of rewards, values, returns, and advantages before they are whitened.

    The advantages' are of those that the loss takes: whitened, and where algorithm.advantage_clip is set `clipped`.
    """
    whitened = found["advantages"].shifted(*whitening(found["advantages"].moments))
    spreads = dict(found) | {"advantages": clipped or whitened}
    names = ("rewards", "values", "returns", "advantages")
    metrics = {metric: value for name in names for metric, value in spreads[name].metrics(f"critic/{name}").items()}
    explained = explained_variance(found["advantages"].moments, found["returns"].moments)
    return metrics | {"critic/explained_variance": explained}


def explained_variance(advantages: Moments, returns: Moments) -> float:
    """Return 1 - Var(R - V) / Var(R), where the advantages before they are whitened are R - V.

    1: the values say all that there is to know; 0: no more than a constant would. nan where all returns are equal.
    """
    return 1.0 - advantages.squares / returns.squares if returns.squares > 0.0 else math.nan
