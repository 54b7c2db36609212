"""Estimates of the KL divergence from the policy to the reference, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.algorithms.sequences import sequence_sums

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Other names of the estimators, as verl and MindSpeed-RL have them."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) from each response token alone [N], differentiable in `logprobs` [N].

    With d = log reference - log policy (http://joschu.net/blog/kl-approx.html):
    k1 = -d              unbiased, noisy, may be negative; as a loss its expected gradient is zero
    k2 = d^2 / 2         biased, low variance; as a loss its expected gradient is the KL's
    k3 = exp(d) - 1 - d  unbiased, never negative; the estimator of GRPO (https://arxiv.org/abs/2402.03300, equation 4)
    abs = |d|            biased, never negative; a distance rather than an estimate

    Unbiased means for tokens sampled from the policy itself. k3 uses expm1, which keeps the digits that exp(d) - 1
    loses when the two models nearly agree; unlike verl's and MindSpeed-RL's it is not clamped.
    """
    d = reference_logprobs - logprobs
    kind = ALIASES.get(kind, kind)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(d) - d
    if kind == "abs":
        return d.abs()
    raise ValueError(f"algorithm.kl_estimator = {kind!r}: choose k1, k2, k3 or abs")


def token_rewards_with_kl(
    token_rewards: Tensor, logprobs: Tensor, reference_logprobs: Tensor, coefficient: float, kind: str = "k1"
) -> Tensor:
    """Return r_t - coefficient * KL_t at each response token [N], without gradient: the divergence in the reward
    (https://arxiv.org/abs/2203.02155, equation 2); `logprobs` are the policy's before the update."""
    return token_rewards - coefficient * kl_estimate(logprobs, reference_logprobs, kind).detach()


def sample_kl(logprobs: Tensor, reference_logprobs: Tensor, lengths: Sequence[int], kind: str = "k1") -> Tensor:
    """Return the sum of each sample's estimates [S], without gradient: what the reward of a sample as a whole pays."""
    return sequence_sums(kl_estimate(logprobs, reference_logprobs, kind).detach(), lengths)
