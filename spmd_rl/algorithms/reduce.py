"""From per-token losses to one number whose value does not depend on how the samples are split over ranks.

Each function returns the weight of each trained token of each sample in the mini-batch's loss. `loss_tokens`: of ALL
samples of the mini-batch, over all ranks, the tokens that are trained on. The loss is the plain sum, over ranks and
micro-batches, of weight * token loss: denominators are global and known before any forward pass, so any partition of
the samples gives the same gradient. A sample without such tokens weighs 0.0 and is not counted.
"""

from collections.abc import Sequence


def token_mean(loss_tokens: Sequence[int]) -> list[float]:
    """Average over all tokens, so that long responses count for more (DAPO, https://arxiv.org/abs/2503.14476, section
    3.3)."""
    total_tokens = sum(loss_tokens)
    return [1.0 / total_tokens if tokens else 0.0 for tokens in loss_tokens]


def sequence_mean(loss_tokens: Sequence[int]) -> list[float]:
    """Average over samples each sample's token mean (GRPO, https://arxiv.org/abs/2402.03300, equation 3; there group by
    group, which is the same number when all groups are of one size)."""
    samples = sum(tokens > 0 for tokens in loss_tokens)
    return [1.0 / (samples * tokens) if tokens else 0.0 for tokens in loss_tokens]


def sequence_sum(loss_tokens: Sequence[int]) -> list[float]:
    """Average over samples each sample's sum: the gradient of a sample as one action (RLOO,
    https://arxiv.org/abs/2402.14740; ReMax)."""
    samples = sum(tokens > 0 for tokens in loss_tokens)
    return [1.0 / samples if tokens else 0.0 for tokens in loss_tokens]


def fixed_length(loss_tokens: Sequence[int], max_response_length: int) -> list[float]:
    """Average over samples each sample's sum divided by one length for all, the longest there can be, so that a token
    weighs the same in a short response and a long one, and in every step (Dr. GRPO, https://arxiv.org/abs/2503.20783,
    section 3.2)."""
    return [weight / max_response_length for weight in sequence_sum(loss_tokens)]
