"""Choosing what to train on, from rewards alone."""

from collections.abc import Sequence

from spmd_rl.algorithms.advantage import samples_by_group


def all_samples(groups: Sequence[int], rewards: Sequence[float]) -> list[bool]:
    """Keep every sample."""
    return [True] * len(rewards)


def teaching_samples(groups: Sequence[int], rewards: Sequence[float]) -> list[bool]:
    """Keep the samples whose group teaches: those of a group whose rewards are all equal have no advantage
    (dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

    A group of one sample is uniform. Departure: DAPO samples until the batch is full of groups that teach; this only
    names the samples, and who drops the others trains on a smaller batch.
    """
    teaches = {
        group: min(rewards[i] for i in members) != max(rewards[i] for i in members)
        for group, members in samples_by_group(groups).items()
    }
    return [teaches[group] for group in groups]


def group_fractions(groups: Sequence[int], kept: Sequence[bool], correct: Sequence[bool]) -> dict[str, float]:
    """Return the `groups/*` metrics of a step: fractions of its groups, 0.0 when there are none.

    A group is kept when a sample of it is. `correct` is asked of each sample apart from its reward, because a wrong
    answer can earn a reward too (format); it is empty when no answer was judged, and nothing is said of that then.
    """
    members = samples_by_group(groups).values()
    count = max(1, len(members))
    fractions = {"groups/kept_fraction": sum(any(kept[i] for i in m) for m in members) / count}
    if groups and not correct:
        return fractions
    return fractions | {
        "groups/all_correct_fraction": sum(all(correct[i] for i in m) for m in members) / count,
        "groups/all_wrong_fraction": sum(not any(correct[i] for i in m) for m in members) / count,
    }
