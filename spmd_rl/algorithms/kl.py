"""Estimates of the KL divergence from the policy to the reference, token by token."""

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) from each response token alone [N], differentiable in `logprobs` [N].

    With d = log reference - log policy (http://joschu.net/blog/kl-approx.html):
    k1 = -d              unbiased, noisy, may be negative; as a loss its expected gradient is zero
    k2 = d^2 / 2         biased, low variance; as a loss its expected gradient is the KL's
    k3 = exp(d) - 1 - d  unbiased, never negative; the estimator of GRPO (https://arxiv.org/abs/2402.03300, equation 4)

    Unbiased means for tokens sampled from the policy itself. k3 uses expm1, which keeps the digits that exp(d) - 1
    loses when the two models nearly agree; unlike verl's it is not clamped.
    """
    d = reference_logprobs - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"algorithm.kl_estimator = {kind!r}: choose k1, k2 or k3")
