"""Scores of a reward model on a common scale, so that a weight means the same for every model and every prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.algorithms.advantage import samples_by_group

EPSILON = 1e-6
"""Added to a standard deviation."""


@dataclass(frozen=True)
class Moments:
    """Number of scores, their mean, and the sum of the squares of their distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """With n - 1; 0.0 of fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def with_more(self, scores: Sequence[float]) -> "Moments":
        """These scores and more, as if all had come together."""
        if not scores:
            return self
        mean = math.fsum(scores) / len(scores)
        return self.joined(Moments(len(scores), mean, math.fsum((score - mean) ** 2 for score in scores)))

    def joined(self, other: "Moments") -> "Moments":
        """Return the moments of both together (Chan, Golub and LeVeque 1979, eq. 2.1)."""
        if not other.count:
            return self
        count, distance = self.count + other.count, other.mean - self.mean
        return Moments(
            count,
            self.mean + distance * other.count / count,
            self.squares + other.squares + distance**2 * self.count * other.count / count,
        )


def standardized(scores: Sequence[float], moments: Moments) -> list[float]:
    """(score - mean) / (std + epsilon); exactly 0.0 where all scores were equal, which tells nothing apart."""
    if moments.std == 0.0:
        return [0.0] * len(scores)
    return [(score - moments.mean) / (moments.std + EPSILON) for score in scores]


def standardized_in_groups(groups: Sequence[int], scores: Sequence[float]) -> list[float]:
    """`standardized` among the samples of each prompt; `groups[i]` is the prompt of sample i."""
    values = [0.0] * len(scores)
    for members in samples_by_group(groups).values():
        own = [scores[i] for i in members]
        # Equal scores have a deviation of exactly zero, whatever rounding makes of their mean.
        moments = Moments(len(own), own[0]) if min(own) == max(own) else Moments().with_more(own)
        for i, value in zip(members, standardized(own, moments), strict=True):
            values[i] = value
    return values


def clipped(scores: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """No score below the first bound or above the second; without bounds, the scores."""
    if not bounds:
        return list(scores)
    lowest, highest = bounds
    return [min(max(score, lowest), highest) for score in scores]
