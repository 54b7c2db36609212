"""Which groups teach: choosing what to train on, from rewards alone."""

from collections.abc import Sequence

from spmd_rl.algorithms.advantage import samples_by_group


def uniform_groups(groups: Sequence[int], rewards: Sequence[float]) -> dict[int, bool]:
    """Group -> whether all its rewards are equal, so that every advantage in it is zero and it teaches nothing
    (dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

    A group of one sample is uniform. Departure: DAPO samples until the batch is full of groups that teach; this only
    names the groups, and a caller that drops them trains on a smaller batch.
    """
    return {
        group: min(rewards[i] for i in members) == max(rewards[i] for i in members)
        for group, members in samples_by_group(groups).items()
    }


def teaching_samples(groups: Sequence[int], rewards: Sequence[float]) -> list[bool]:
    """For each sample, whether its group teaches (is not uniform)."""
    uniform = uniform_groups(groups, rewards)
    return [not uniform[group] for group in groups]


def group_fractions(
    groups: Sequence[int], rewards: Sequence[float], correct: Sequence[bool], drop_uniform_groups: bool
) -> dict[str, float]:
    """The `groups/*` metrics of a step: fractions of its groups, 0.0 when there are none.

    `correct` is asked of each sample apart from its reward, because a wrong answer can earn a reward too (format); it
    is empty when no answer was judged, and nothing is said of that then.
    """
    members = samples_by_group(groups).values()
    uniform = uniform_groups(groups, rewards).values()
    count = max(1, len(members))
    kept = sum(not u for u in uniform) if drop_uniform_groups else len(members)
    if rewards and not correct:
        return {"groups/kept_fraction": kept / count}
    return {
        "groups/kept_fraction": kept / count,
        "groups/all_correct_fraction": sum(all(correct[i] for i in m) for m in members) / count,
        "groups/all_wrong_fraction": sum(not any(correct[i] for i in m) for m in members) / count,
    }
