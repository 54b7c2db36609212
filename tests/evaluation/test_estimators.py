"""Estimators against brute force and known values."""

import itertools
import math
import random

import pytest

from spmd_rl.evaluation.estimators import (
    Z95,
    clustered,
    majority_at_k,
    mcnemar,
    pass_at_k,
    powers_of_two,
    wilson,
)


def test_powers_of_two_end_with_the_number_itself():
    assert [powers_of_two(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("n, c", [(1, 0), (1, 1), (5, 0), (5, 2), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, c):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_one_is_the_accuracy_and_large_numbers_stay_exact():
    assert pass_at_k(1024, 256, 1) == 0.25
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5, abs=1e-15)


def test_pass_at_k_is_unbiased():
    """Its mean over draws of n samples with success p is 1 - (1 - p)^k."""
    n, p = 6, 0.3
    for k in range(1, n + 1):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def brute_majority(votes, correct, silent, k):
    samples = [i for i, count in enumerate(votes) for _ in range(count)] + [None] * silent
    total = subsets = 0.0
    for subset in itertools.combinations(samples, k):
        subsets += 1
        counts = [sum(answer == i for answer in subset) for i in range(len(votes))]
        best = max(counts, default=0)
        if correct is not None and best and counts[correct] == best:
            total += 1 / counts.count(best)
    return total / subsets


def test_majority_at_k_is_the_average_over_all_subsets_with_ties_shared():
    rng = random.Random(3)
    cases = [([], None, 3), ([2], 0, 0), ([1, 1], 0, 0), ([3, 2, 2], 1, 1), ([1, 1, 1, 1], 2, 0), ([4, 1], None, 1)]
    for _ in range(25):
        votes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        cases.append((votes, rng.choice([None, *range(len(votes))]), rng.randint(0, 2)))
    for votes, correct, silent in cases:
        found = majority_at_k(votes, correct, silent)
        n = sum(votes) + silent
        assert len(found) == n
        for k in range(1, n + 1):
            assert found[k - 1] == pytest.approx(brute_majority(votes, correct, silent, k), abs=1e-12), (votes, k)


def test_the_majority_of_one_is_the_accuracy_and_of_all_is_the_vote():
    assert majority_at_k([3, 4, 1], 0, 2)[0] == pytest.approx(0.3)
    assert majority_at_k([3, 4, 1], 0, 2)[-1] == 0.0
    assert majority_at_k([3, 2, 1], 0, 9)[-1] == 1.0
    assert majority_at_k([2, 2, 1], 0, 0)[-1] == 0.5


@pytest.mark.long
def test_majority_of_many_samples_is_a_probability():
    found = majority_at_k([300, 200, 100, 100] + [1] * 24, 0, 300)
    assert len(found) == 1024
    assert all(0.0 <= value <= 1.0 + 1e-9 for value in found) and found[-1] == pytest.approx(1.0)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found[2:]))


@pytest.mark.parametrize("correct, count", [(0, 10), (10, 10), (5, 10), (45, 100), (1, 1319)])
def test_wilsons_bounds_are_the_proportions_that_the_score_test_just_rejects(correct, count):
    p = correct / count
    for bound in wilson(correct, count):
        assert (p - bound) ** 2 == pytest.approx(Z95**2 * bound * (1 - bound) / count, abs=1e-12)


def test_wilson_of_all_and_of_none_is_the_known_closed_form():
    assert wilson(10, 10) == pytest.approx((10 / (10 + Z95**2), 1.0))
    assert wilson(0, 10) == pytest.approx((0.0, Z95**2 / (10 + Z95**2)))


def test_clustering_by_question_is_the_usual_interval_of_a_mean():
    means = [0.0, 0.5, 1.0, 0.5]
    s = math.sqrt(0.5 / 3)
    assert clustered(means) == pytest.approx((0.5 - 1.959964 * s / 2, 0.5 + 1.959964 * s / 2), abs=1e-6)
    assert clustered([1.0, 0.0]) == (0.0, 1.0)
    assert clustered([0.25]) == (0.0, 1.0)


def test_samples_of_one_question_do_not_narrow_the_interval():
    """Eight equal samples of each question tell what one does."""
    right = [1.0] * 45 + [0.0] * 55
    low, high = clustered(right)
    assert (low, high) == pytest.approx((0.45 - 1.96 * 0.05, 0.45 + 1.96 * 0.05), abs=1e-3)


@pytest.mark.parametrize(
    "wins, losses, p",
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (0, 6, 0.03125), (10, 2, 0.03857421875), (121, 59, 4.434e-06)],
)
def test_mcnemar_is_the_exact_binomial_sum_both_ways(wins, losses, p):
    assert mcnemar(wins, losses) == mcnemar(losses, wins) == pytest.approx(p, rel=1e-3)
