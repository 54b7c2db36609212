"""Correct for samples that another policy wrote: vLLM's probabilities of a token are not quite the trainer's.

Each function returns the weight of each token in the policy's loss and where it was bounded, both [N] and without
gradient, from the log-probabilities of the trainer's policy before the update and of the one that wrote the tokens
(`rollout_logprobs`). k = exp(policy - rollout) is 1 exactly where the two are equal. The weight multiplies the
advantage: every loss that is linear in it is thereby weighted, and its divergence and entropy are not.

Departure of all that reject: what weighs 0 still counts in the loss's denominator, which is known before any forward
pass, so that no layout changes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.algorithms.sequences import sequence_means, sequence_sums, spread

Weights = tuple[Tensor, Tensor]


def no_correction(policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int]) -> Weights:
    """Weigh every token 1."""
    return torch.ones_like(policy_logprobs), torch.zeros_like(policy_logprobs, dtype=torch.bool)


def token_truncate(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int], bound: float = 2.0
) -> Weights:
    """Weigh a token min(k, bound): truncated importance sampling (Ionides 2008; for this gap Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl)."""
    return _truncated(torch.exp(policy_logprobs - rollout_logprobs), bound)


def sequence_truncate(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int], bound: float = 2.0
) -> Weights:
    """Weigh all tokens of a sample min(product of their k, bound): unbiased without the bound, where the weights of
    single tokens are not (Liu et al. 2025, https://richardli.xyz/rl-collapse)."""
    return _truncated(spread(torch.exp(sequence_sums(policy_logprobs - rollout_logprobs, lengths)), lengths), bound)


def token_mask(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int], low: float = 0.5, high: float = 5.0
) -> Weights:
    """Weigh a token k, and 0 outside [low, high] (IcePop, https://arxiv.org/abs/2510.18855)."""
    return _masked(torch.exp(policy_logprobs - rollout_logprobs), low, high)


def sequence_mask(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int], low: float = 0.0, high: float = 3.0
) -> Weights:
    """Weigh all tokens of a sample the product of their k, and 0 outside [low, high]: masked importance sampling
    (MIS, Liu et al. 2025, https://richardli.xyz/rl-collapse)."""
    return _masked(spread(torch.exp(sequence_sums(policy_logprobs - rollout_logprobs, lengths)), lengths), low, high)


def geometric_mask(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Sequence[int], low: float = 0.99, high: float = 1.01
) -> Weights:
    """Weigh all tokens of a sample 1, and 0 where the geometric mean of their k is outside [low, high]: rejection that
    does not depend on the length (Liu et al. 2025, https://richardli.xyz/rl-collapse)."""
    mean = spread(torch.exp(sequence_means(policy_logprobs - rollout_logprobs, lengths)), lengths)
    outside = _outside(mean, low, high)
    return (~outside).to(mean.dtype).detach(), outside


def _truncated(ratio: Tensor, bound: float) -> Weights:
    return ratio.clamp(max=bound).detach(), ratio.detach() > bound


def _masked(ratio: Tensor, low: float, high: float) -> Weights:
    outside = _outside(ratio, low, high)
    # Not a product with 0: that of an infinite ratio is no number.
    return torch.where(outside, 0.0, ratio).detach(), outside


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio.detach() < low) | (ratio.detach() > high)


def _check_bound(bound: float = 2.0) -> None:
    if not 1.0 <= bound < float("inf"):
        raise ValueError(f"bound = {bound} should be 1 or more: equal probabilities weigh 1")


def _check_range(low: float = 0.0, high: float = 2.0) -> None:
    if not (0.0 <= low <= 1.0 <= high < float("inf")):
        raise ValueError(f"low = {low}, high = {high} should lie around 1: equal probabilities weigh 1")


token_truncate.check = sequence_truncate.check = _check_bound  # type: ignore[attr-defined]
token_mask.check = sequence_mask.check = geometric_mask.check = _check_range  # type: ignore[attr-defined]
