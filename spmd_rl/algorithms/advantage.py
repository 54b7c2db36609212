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


def dr_grpo_advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Return each sample's reward less its group's mean: Dr. GRPO (https://arxiv.org/abs/2503.20783, section 3.2)."""
    return group_advantages(groups, rewards, normalize_std=False)


def rloo_advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Return each sample's reward less the mean of its group's others: REINFORCE leave-one-out
    (https://arxiv.org/abs/2402.14740, section 3.3).

    It is n / (n - 1) times the distance to the group's mean. A group of one sample gets 0.0.
    """
    advantages = group_advantages(groups, rewards, normalize_std=False)
    for members in samples_by_group(groups).values():
        for i in members if len(members) > 1 else ():
            advantages[i] *= len(members) / (len(members) - 1)
    return advantages


def remax_advantages(groups: Sequence[int], rewards: Sequence[float], baselines: Sequence[float]) -> list[float]:
    """Return each sample's reward less that of the greedy response to its prompt: ReMax
    (https://arxiv.org/abs/2310.10505, algorithm 2). `baselines[i]`: of the prompt of sample i."""
    return [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]


def reinforce_plus_plus_advantages(
    groups: Sequence[int], rewards: Sequence[float], tokens: Sequence[int], std_epsilon: float = 1e-6
) -> list[float]:
    """Return the rewards whitened over all tokens of the step: REINFORCE++ (https://arxiv.org/abs/2501.03262).

    `tokens[i]`: loss tokens of sample i, each of which has the sample's reward as its return (discount 1).
    """
    return whitened(rewards, tokens, std_epsilon)


def reinforce_plus_plus_baseline_advantages(
    groups: Sequence[int], rewards: Sequence[float], tokens: Sequence[int], std_epsilon: float = 1e-6
) -> list[float]:
    """Return each sample's reward less its group's mean, whitened over all tokens of the step: REINFORCE++-baseline
    (https://arxiv.org/abs/2501.03262)."""
    return whitened(group_advantages(groups, rewards, normalize_std=False), tokens, std_epsilon)


def whitened(values: Sequence[float], tokens: Sequence[int], std_epsilon: float) -> list[float]:
    """Return (value - mean) / (std + std_epsilon), each value counted once a token; the variance is that with n - 1.

    Exactly 0.0 where all values are equal.
    """
    counted = [value for value, count in zip(values, tokens, strict=True) if count]
    if not counted or min(counted) == max(counted):
        return [0.0] * len(values)
    total = sum(tokens)
    mean = math.fsum(value * count for value, count in zip(values, tokens, strict=True)) / total
    squares = math.fsum((value - mean) ** 2 * count for value, count in zip(values, tokens, strict=True))
    scale = math.sqrt(squares / (total - 1)) + std_epsilon
    return [(value - mean) / scale for value in values]


def clipped_advantages(advantages: Sequence[float], bound: float) -> list[float]:
    """Return the advantages in [-bound, bound]."""
    return [min(max(advantage, -bound), bound) for advantage in advantages]
