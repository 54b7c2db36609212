"""Scores of reward models on a common scale, by value and by law."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.score_normalization import Moments, clipped, standardized, standardized_in_groups

SCORES = st.lists(st.floats(-1e3, 1e3), max_size=20)


def test_a_score_is_measured_in_deviations_of_its_own_prompt():
    # Prompt 7: mean 2, deviation 1; prompt 3: mean 20, deviation sqrt(200).
    found = standardized_in_groups([7, 3, 7, 3, 7], [1.0, 10.0, 2.0, 30.0, 3.0])
    assert found == pytest.approx([-1.0, -math.sqrt(0.5), 0.0, math.sqrt(0.5), 1.0], abs=1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e9])
def test_equal_scores_and_a_score_alone_are_exactly_zero(value):
    assert standardized_in_groups([0, 0, 0, 1], [value, value, value, 5.0]) == [0.0] * 4


@given(st.lists(SCORES, max_size=5))
def test_moments_that_grow_step_by_step_are_those_of_all_scores_together(steps):
    moments = Moments()
    for scores in steps:
        moments = moments.with_more(scores)
    together = [score for scores in steps for score in scores]
    assert moments.count == len(together)
    if together:
        assert moments.mean == pytest.approx(statistics.fmean(together), rel=1e-9, abs=1e-9)
    if len(together) > 1:
        assert moments.std == pytest.approx(statistics.stdev(together), rel=1e-6, abs=1e-6)


def test_a_run_is_standardized_by_all_that_was_seen():
    moments = Moments().with_more([1.0, 3.0]).with_more([5.0])
    assert (moments.count, moments.mean, moments.std) == (3, 3.0, 2.0)
    assert standardized([5.0, 3.0], moments) == pytest.approx([1.0, 0.0], abs=1e-5)


def test_one_score_or_none_has_no_scale():
    assert standardized([4.0], Moments().with_more([4.0])) == [0.0]
    assert standardized_in_groups([], []) == []


def test_clipping_keeps_scores_within_its_bounds():
    assert clipped([-5.0, 0.5, 5.0], (-1.0, 2.0)) == [-1.0, 0.5, 2.0]
    assert clipped([-5.0, 5.0], ()) == [-5.0, 5.0]
