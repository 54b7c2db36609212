import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.advantage import group_advantages

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
