"""Advantages: how much better a sample is than what it is compared with."""

import math
from collections import defaultdict
from collections.abc import Sequence


def samples_by_group(groups: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of each group's samples, groups in order of first appearance."""
    members: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    return dict(members)


def group_advantages(
    groups: Sequence[int], rewards: Sequence[float], normalize_std: bool = True, std_epsilon: float = 1e-6
) -> list[float]:
    """Return each sample's reward relative to its group's mean, in units of the group's standard deviation: GRPO's
    outcome supervision (https://arxiv.org/abs/2402.03300, section 4.1.2).

    `groups[i]` is the prompt that sample i answers; the result is in the order of the samples and is the advantage of
    each of a sample's tokens. A = (r - mean) / (std + std_epsilon) with the sample standard deviation (n - 1), as TRL
    and verl compute it; the paper does not say which. normalize_std=False leaves the division out, which Dr. GRPO
    (https://arxiv.org/abs/2503.20783) shows removes a bias towards prompts that are almost always or never solved.

    Departure: a group whose rewards are all equal gets exactly 0.0 (the formula gives rounding noise divided by
    std_epsilon), and so does a group of one sample, which has nothing to be compared with.
    """
    if len(groups) != len(rewards):
        raise ValueError(
            f"group_advantages: {len(groups)} groups for {len(rewards)} rewards; give one group per reward"
        )
    advantages = [0.0] * len(rewards)
    for members in samples_by_group(groups).values():
        values = [rewards[i] for i in members]
        if min(values) == max(values):
            continue
        mean = math.fsum(values) / len(values)
        scale = 1.0
        if normalize_std:
            scale = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) + std_epsilon
        for i in members:
            advantages[i] = (rewards[i] - mean) / scale
    return advantages
