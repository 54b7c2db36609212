import math
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.advantage import (
    group_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
)
from spmd_rl.algorithms.table import find_advantage
from spmd_rl.config.config import AlgorithmConfig

rewards_of_groups = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-100, 100, allow_subnormal=False)), min_size=1, max_size=30
)


def test_a_group_by_hand_gets_the_papers_numbers():
    std = statistics.stdev([1.0, 0.0, 0.0, 1.0])
    got = group_advantages([7, 7, 7, 7], [1.0, 0.0, 0.0, 1.0], normalize_std=True, std_epsilon=1e-6)
    assert got == pytest.approx([sign * 0.5 / (std + 1e-6) for sign in (1, -1, -1, 1)])


def test_without_normalization_the_advantage_is_the_distance_to_the_mean():
    assert group_advantages([0, 0, 1, 1], [3.0, 1.0, 5.0, 6.0], normalize_std=False) == [1.0, -1.0, -0.5, 0.5]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_rewards_and_lonely_samples_get_exactly_zero(normalize_std, epsilon):
    assert group_advantages([0] * 8 + [1], [0.1] * 8 + [5.0], normalize_std, epsilon) == [0.0] * 9


def test_a_group_and_its_rewards_must_match_in_number():
    with pytest.raises(ValueError, match="2 groups for 1 rewards"):
        group_advantages([0, 0], [1.0])


@given(rewards_of_groups)
def test_every_group_sums_to_zero_and_nothing_is_nan(samples):
    groups, rewards = zip(*samples, strict=True)
    advantages = group_advantages(groups, rewards)
    for group in set(groups):
        mine = [a for a, g in zip(advantages, groups, strict=True) if g == group]
        assert all(math.isfinite(a) for a in mine)
        assert abs(sum(mine)) < 1e-6 * max(1.0, *map(abs, mine))


@given(rewards_of_groups, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    groups, rewards = zip(*samples, strict=True)
    straight = group_advantages(groups, rewards)
    shuffled = group_advantages([groups[i] for i in order], [rewards[i] for i in order])
    assert shuffled == [straight[i] for i in order]


@given(rewards_of_groups)
def test_better_rewards_get_better_advantages_within_a_group(samples):
    groups, rewards = zip(*samples, strict=True)
    advantages = group_advantages(groups, rewards)
    for i in range(len(samples)):
        for j in range(len(samples)):
            if groups[i] == groups[j] and rewards[i] < rewards[j]:
                assert advantages[i] <= advantages[j]


# Shifted rewards of a group change nothing; rewards in another unit give advantages in it, or the same ones.
CENTRED = {"grpo": 0, "dr_grpo": 1, "rloo": 1, "reinforce_plus_plus_baseline": 0}
OVER_THE_STEP = {"reinforce_plus_plus": 0}
steps = st.lists(st.tuples(st.integers(0, 3), st.integers(-8, 8), st.integers(1, 9)), min_size=1, max_size=24)


def estimated(name, samples, shift=lambda group: 0.0, scale=1.0, greedy=0.0):
    groups, rewards, tokens = zip(*samples, strict=True)
    estimate = find_advantage(AlgorithmConfig(advantage=name, std_epsilon=0.0))
    moved = [scale * reward + shift(group) for group, reward in zip(groups, rewards, strict=True)]
    baselines = [scale * greedy * group + shift(group) for group in groups]
    return estimate(groups, moved, tokens=tokens, baselines=baselines)


@pytest.mark.parametrize("name", [*CENTRED, "remax"])
@given(samples=steps, shift=st.integers(-5, 5))
def test_rewards_that_are_shifted_for_all_of_a_group_give_the_same_advantages(name, samples, shift):
    moved = estimated(name, samples, lambda group: shift * group, greedy=0.5)
    assert moved == pytest.approx(estimated(name, samples, greedy=0.5), abs=1e-9)


@pytest.mark.parametrize("name", OVER_THE_STEP)
@given(samples=steps, shift=st.integers(-5, 5))
def test_rewards_that_are_shifted_for_all_of_a_step_give_the_same_advantages(name, samples, shift):
    assert estimated(name, samples, lambda group: shift) == pytest.approx(estimated(name, samples), abs=1e-9)


@pytest.mark.parametrize("name, power", {**CENTRED, **OVER_THE_STEP, "remax": 1}.items())
@given(samples=steps, scale=st.sampled_from([0.25, 3.0, 40.0]))
def test_rewards_in_another_unit_change_advantages_by_a_known_factor(name, power, samples, scale):
    expected = [scale**power * advantage for advantage in estimated(name, samples, greedy=0.5)]
    assert estimated(name, samples, scale=scale, greedy=0.5) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", [*CENTRED, *OVER_THE_STEP, "remax"])
@given(samples=steps, random=st.randoms(use_true_random=False))
def test_no_advantage_depends_on_the_order_of_the_samples(name, samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    straight = estimated(name, samples, greedy=0.5)
    shuffled = estimated(name, [samples[i] for i in order], greedy=0.5)
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("name", CENTRED)
def test_a_group_of_one_sample_has_nothing_to_be_compared_with(name):
    assert estimated(name, [(0, 5, 3), (1, 2, 4), (2, -7, 1)]) == [0.0] * 3


@pytest.mark.parametrize("name", [*CENTRED, *OVER_THE_STEP])
def test_rewards_that_are_all_equal_teach_exactly_nothing(name):
    assert estimated(name, [(0, 0.1, 3)] * 5 + [(1, 0.1, 4)] * 3) == [0.0] * 8


def test_leaving_one_out_compares_with_the_mean_of_the_others():
    assert rloo_advantages([0, 0, 0, 7], [1.0, 0.0, 5.0, 3.0]) == pytest.approx([-1.5, -3.0, 4.5, 0.0])


def test_the_advantage_of_ones_own_in_the_docs_is_that_of_leaving_one_out(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (source,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def leave_one_out" in one]
    (tmp_path / "mine.py").write_text(source)
    step = [0, 0, 0, 1, 1], [1.0, 0.0, 0.5, 2.0, -1.0]
    mine = find_advantage(AlgorithmConfig(advantage=f"{tmp_path / 'mine.py'}:leave_one_out(scale=0.5)"))(*step)
    assert mine == pytest.approx([one / 2 for one in find_advantage(AlgorithmConfig(advantage="rloo"))(*step)])


def test_remax_compares_with_the_greedy_response():
    assert remax_advantages([0, 0, 1], [1.0, 0.0, 1.0], [1.0, 1.0, 0.5]) == [0.0, -1.0, 0.5]


@given(steps)
def test_whitening_gives_the_tokens_of_a_step_mean_0_and_variance_1(samples):
    groups, rewards, tokens = zip(*samples, strict=True)
    advantages = reinforce_plus_plus_advantages(groups, rewards, tokens, std_epsilon=0.0)
    by_token = [a for a, count in zip(advantages, tokens, strict=True) for _ in range(count)]
    if len(set(rewards)) > 1:
        assert statistics.fmean(by_token) == pytest.approx(0.0, abs=1e-9)
        assert statistics.variance(by_token) == pytest.approx(1.0)


def test_a_sample_without_tokens_is_not_counted():
    counted = reinforce_plus_plus_advantages([0, 0], [1.0, 3.0], [2, 3])
    assert reinforce_plus_plus_advantages([0, 0, 0], [1.0, 9.0, 3.0], [2, 0, 3])[::2] == counted


def test_advantages_are_kept_within_a_bound():
    estimate = find_advantage(AlgorithmConfig(advantage="dr_grpo", advantage_clip=2.0))
    assert estimate([0, 0, 1, 1], [0.0, 10.0, 1.0, 0.0]) == [-2.0, 2.0, 0.5, -0.5]


@pytest.mark.parametrize("name", [*CENTRED, *OVER_THE_STEP, "remax"])
def test_rewards_that_are_no_numbers_are_refused_with_the_setting(name):
    with pytest.raises(ValueError, match=f"algorithm.advantage: '{name}' .* not finite"):
        estimated(name, [(0, math.nan, 3), (0, 1.0, 3), (0, 2.0, 1)])
