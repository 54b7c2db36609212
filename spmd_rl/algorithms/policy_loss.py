"""The policy's loss, token by token; the weights of reduce.py turn it into one number."""

import torch
from torch import Tensor

from spmd_rl.algorithms.kl import kl_estimate


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, negated, at each response token (https://arxiv.org/abs/1707.06347, equation 7).

    All tensors are flat [N] over response tokens; `old_logprobs` are the policy's before the update and `advantages`
    carry no gradient. Returns (loss [N], clipped [N] bool); `clipped` marks the tokens where clipping changed the loss
    and therefore stopped the gradient. Departure: two bounds instead of one, the ratio is kept in
    [1 - clip_low, 1 + clip_high] (clip-higher of DAPO, https://arxiv.org/abs/2503.14476, section 3.1).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped_loss, clipped_loss), (clipped_loss > unclipped_loss).detach()


def token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    reference_logprobs: Tensor | None,
    entropy: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GRPO's loss at each response token: surrogate + kl_coefficient * KL - entropy_coefficient * entropy
    (https://arxiv.org/abs/2402.03300, equation 3; the entropy bonus is PPO's, equation 9).

    All tensors are flat [N] over response tokens. Returns the loss [N],
    with its gradient, and its parts [N] without, for the log: pg_loss, kl_loss (zeros without a reference), clipped
    (1.0 where the ratio was clipped) and ppo_kl (log-probability before the update - now).
    """
    pg_loss, clipped = clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)
    loss = pg_loss
    kl_loss = torch.zeros_like(pg_loss)
    if reference_logprobs is not None:
        kl_loss = kl_estimate(logprobs, reference_logprobs, kl_estimator)
    # A term with coefficient 0 is left out rather than multiplied by 0: 0 * inf is NaN, and its gradient costs memory.
    if kl_coefficient != 0.0:
        if reference_logprobs is None:
            raise ValueError(
                f"algorithm.kl_coefficient = {kl_coefficient}: the loss got no reference log-probabilities; "
                "score the reference first or set it to 0"
            )
        loss = loss + kl_coefficient * kl_loss
    if entropy_coefficient != 0.0:
        if entropy is None:
            raise ValueError(
                f"algorithm.entropy_coefficient = {entropy_coefficient}: the loss got no entropies; "
                "compute them in the forward pass or set it to 0"
            )
        loss = loss - entropy_coefficient * entropy
    parts = {
        "pg_loss": pg_loss,
        "kl_loss": kl_loss,
        "clipped": clipped.to(loss.dtype),
        "ppo_kl": old_logprobs - logprobs,
    }
    return loss, {name: part.detach() for name, part in parts.items()}
