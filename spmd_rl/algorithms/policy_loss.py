"""The policy's loss, token by token; the weights of reduce.py turn it into one number.

Every surrogate returns (loss [N], clipped [N] bool) at each response token: `clipped` marks the tokens where clipping
changed the loss and therefore stopped the gradient, or bounded its weight. All tensors are flat [N] over response
tokens; `old_logprobs` are the policy's before the update and `advantages` carry no gradient. `lengths`: the response
tokens of each sample, in order; N in all.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algorithms.kl import kl_estimate
from spmd_rl.algorithms.sequences import sequence_means, sequence_sums, spread

Surrogate = Callable[..., tuple[Tensor, Tensor]]
_LARGEST_LOG_RATIO = 20.0


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, negated, at each response token (https://arxiv.org/abs/1707.06347, equation 7).

    Departure: two bounds instead of one, the ratio is kept in [1 - clip_low, 1 + clip_high] (clip-higher of DAPO,
    https://arxiv.org/abs/2503.14476, section 3.1).
    """
    return _clipped(torch.exp(logprobs - old_logprobs), advantages, clip_low, clip_high)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped_loss, clipped_loss), (clipped_loss > unclipped_loss).detach()


def dual_clip_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate whose loss on a token with a negative advantage is at most clip_dual * |advantage|:
    dual-clip PPO (https://arxiv.org/abs/1912.09729, equation 5, c = clip_dual)."""
    loss, clipped = clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)
    most = torch.where(advantages < 0, -clip_dual * advantages, torch.inf)
    return torch.minimum(loss, most), clipped | (loss > most).detach()


def gspo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    lengths: Sequence[int],
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate of a sample's ratio (pi / pi_old)^(1 / length) at each of its tokens: Group Sequence
    Policy Optimization (https://arxiv.org/abs/2507.18071, equations 5 to 7)."""
    ratio = spread(torch.exp(sequence_means(logprobs - old_logprobs, lengths)), lengths)
    return _clipped(ratio, advantages, clip_low, clip_high)


def rloo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    lengths: Sequence[int],
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate of a sample's ratio pi / pi_old at each of its tokens, the response being one action
    (RLOO, https://arxiv.org/abs/2402.14740, section 3).

    Departure: the ratio's logarithm is kept in [-20, 20], beyond which a sum over many tokens is infinite.
    """
    log_ratio = sequence_sums(logprobs - old_logprobs, lengths).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return _clipped(spread(torch.exp(log_ratio), lengths), advantages, clip_low, clip_high)


def cispo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE's loss weighted by the ratio, which is bounded and carries no gradient, so that no token loses
    its gradient: CISPO (https://arxiv.org/abs/2506.13585, equations 4 and 5). clip_low = 1 bounds it from above only.
    """
    ratio = torch.exp(logprobs - old_logprobs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def token_loss(  # noqa: PLR0913 (pure: plain numbers, no section of settings)
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    reference_logprobs: Tensor | None,
    entropy: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 3.0,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
    lengths: Sequence[int] = (),
    surrogate: Surrogate = clipped_surrogate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GRPO's loss at each response token: surrogate + kl_coefficient * KL - entropy_coefficient * entropy
    (https://arxiv.org/abs/2402.03300, equation 3; the entropy bonus is PPO's, equation 9).

    The other losses of this file are this one with another surrogate. Returns the loss [N], with its gradient, and its
    parts [N] without, for the log: pg_loss, kl_loss (zeros without a reference), clipped (1.0 where the ratio was
    clipped) and ppo_kl (log-probability before the update - now).
    """
    clip = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    pg_loss, clipped = surrogate(logprobs, old_logprobs, advantages, **clip, lengths=lengths)
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


dual_clip_loss = partial(token_loss, surrogate=dual_clip_surrogate)
gspo_loss = partial(token_loss, surrogate=gspo_surrogate)
rloo_loss = partial(token_loss, surrogate=rloo_surrogate)
cispo_loss = partial(token_loss, surrogate=cispo_surrogate)
