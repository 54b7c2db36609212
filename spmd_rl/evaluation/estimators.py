"""Estimators, intervals and a test for how often a model is right, as pure functions."""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95 %."""


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k) of `samples` n, `correct` c.

    The unbiased estimator of https://arxiv.org/abs/2107.03374, equation 1.
    """
    assert 0 <= correct <= samples and 1 <= k <= samples, (samples, correct, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(votes: Sequence[int], correct: int | None, silent: int) -> list[float]:
    """Probability that the most frequent answer of k samples is the correct one, for k = 1 .. n.

    `votes`: samples of each distinct answer. `correct`: the position of the correct one, None: nobody gave it.
    `silent`: samples without an answer, which do not vote. The k samples are drawn from the n without replacement; this
    is the average over all such draws, and of several most frequent answers each is taken equally often. So it is an
    unbiased estimator, as `pass_at_k` is; with k = n nothing is drawn.
    """
    n = sum(votes) + silent
    if correct is None:
        return [0.0] * n
    others = [count for position, count in enumerate(votes) if position != correct]
    won = np.zeros(n + 1)
    for mine in range(1, votes[correct] + 1):
        # ways[t, k]: draws of k samples of the others in which t answers have `mine` votes too, and none has more.
        ways = np.zeros((len(others) + 1, n + 1))
        ways[0] = _row([math.comb(silent, i) for i in range(silent + 1)], n)
        for count in others:
            ways = _drawn(ways, count, mine)
        shared = ways / np.arange(1, len(others) + 2)[:, None]
        won[mine:] += math.comb(votes[correct], mine) * shared.sum(0)[: n + 1 - mine]
    return [float(won[k] / math.comb(n, k)) for k in range(1, n + 1)]


def _row(values: Sequence[int], n: int) -> np.ndarray:
    return np.array([*values, *[0] * (n + 1 - len(values))], dtype=float)


def _drawn(ways: np.ndarray, count: int, most: int) -> np.ndarray:
    """With one answer more, of `count` votes, of which up to `most` are drawn."""
    found = ways.copy()
    for i in range(1, min(count, most) + 1):
        more = np.zeros_like(ways)
        more[:, i:] = math.comb(count, i) * ways[:, :-i]
        if i == most:
            more = np.roll(more, 1, axis=0)
            more[0] = 0.0
        found += more
    return found


def wilson(correct: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (https://doi.org/10.1080/01621459.1927.10502953).

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = correct / n.
    """
    p, square = correct / count, z * z / count
    middle = p + square / 2
    reach = z * math.sqrt(p * (1 - p) / count + square / (4 * count))
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def clustered(means: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """Interval of the mean of questions' accuracies, which are independent where a question's samples are not.

    mean ± z s / sqrt(Q), s the standard deviation of the Q means (with Q - 1), cut to [0, 1]. One question: [0, 1].
    """
    count = len(means)
    mean = math.fsum(means) / count
    if count < 2:
        return 0.0, 1.0
    reach = z * math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1) / count)
    return max(0.0, mean - reach), min(1.0, mean + reach)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p that two models are equally good, from the questions only one of them got right.

    min(1, 2 P(X <= min(wins, losses))), X binomial with wins + losses trials of 1/2. Where accuracies rather than
    single answers are compared this is the sign test, which is the same sum.
    """
    trials = wins + losses
    return min(1.0, 2 * sum(math.comb(trials, i) for i in range(min(wins, losses) + 1)) / 2**trials)
