from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.advantage import group_advantages
from spmd_rl.algorithms.curation import all_samples, group_fractions, teaching_samples


def test_a_group_is_uniform_when_all_its_rewards_are_equal():
    assert teaching_samples([0, 1, 0, 1, 2], [1.0, 0.0, 1.0, 0.5, 9.0]) == [False, True, False, True, False]


def test_the_fractions_count_groups_and_ask_correctness_apart_from_reward():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    rewards = [1.1, 1.0, 0.1, 0.1, 0.0, 1.0, 0.0, 0.0]
    correct = [True, True, False, False, False, True, False, False]
    assert group_fractions(groups, teaching_samples(groups, rewards), correct) == {
        "groups/kept_fraction": 0.5,
        "groups/all_correct_fraction": 0.25,
        "groups/all_wrong_fraction": 0.5,
    }
    assert group_fractions(groups, all_samples(groups, rewards), correct)["groups/kept_fraction"] == 1.0


def test_no_groups_have_fractions_of_zero():
    assert set(group_fractions([], [], []).values()) == {0.0}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.1, 1.0])), min_size=1))
def test_the_samples_that_do_not_teach_are_those_with_no_advantage_in_their_group(samples):
    groups, rewards = zip(*samples, strict=True)
    advantages = group_advantages(groups, rewards)
    for group, teaches in zip(groups, teaching_samples(groups, rewards), strict=True):
        assert teaches == any(a != 0.0 for a, g in zip(advantages, groups, strict=True) if g == group)
