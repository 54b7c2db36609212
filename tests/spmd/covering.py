"""Few cases of many: every pair of values of two factors that occurs in any case occurs in one of them."""

from collections.abc import Mapping, Sequence
from itertools import combinations


def pairs(case: Mapping[str, object]) -> set[tuple]:
    """Return the pairs of (factor, value) of a case."""
    return set(combinations(sorted(case.items()), 2))


def covering(cases: Sequence[Mapping[str, object]], costs: Sequence[float] | None = None) -> list[int]:
    """Return the numbers of cases that have every pair which any has; the greatest gain for the least cost first."""
    costs = costs or [1.0] * len(cases)
    left, chosen = [pairs(case) for case in cases], []
    while any(left):
        best = max(range(len(cases)), key=lambda number: (len(left[number]) / costs[number], -number))
        chosen.append(best)
        found = left[best]
        left = [one - found for one in left]
    return sorted(chosen)
