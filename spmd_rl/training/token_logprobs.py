"""Log-probabilities and entropies of chosen tokens from a vocabulary-sharded output layer, in chunks.

The logits of a micro-batch never exist at once: each chunk of `chunk` tokens makes its own [chunk, V/tp] and drops it;
the backward pass makes them again.
"""

from typing import Any

import torch
import torch.distributed as dist


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    first_row: int,
    group: dist.ProcessGroup | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural-log probabilities of `targets` and entropies, fp32, of softmax(hidden @ weight.T / temperature).

    hidden [N, H]; weight [V/tp, H], without padding rows; targets [N], ids in the whole vocabulary; first_row: the id
    of this shard's first row. Returns ([N], [N]), equal on all ranks of `group`; the gradient of `hidden` is this
    shard's part only (the caller sums it over the group).
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, first_row, group, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        first_row: int,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normalizer = torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature)  # [C, V/tp]
            peak = _reduce(logits.amax(-1), group, dist.ReduceOp.MAX)  # [C]
            chosen = _chosen(logits, targets[part], first_row)  # [C]
            weights = logits - peak[:, None]
            weights.exp_()
            total = weights.sum(-1)  # [C]
            # sum(p * z) without another [C, V/tp]
            expected = torch.bmm(weights[:, None], logits[:, :, None]).flatten()  # [C]
            total, chosen, expected = _reduce(torch.stack((total, chosen, expected)), group, dist.ReduceOp.SUM)
            log_normalizer[part] = peak + total.log()
            logprobs[part] = chosen - log_normalizer[part]
            entropy[part] = log_normalizer[part] - expected / total
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.temperature, ctx.first_row, ctx.chunk = temperature, first_row, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            rows = hidden[part]
            log_p = _logits(rows, weight, ctx.temperature).sub_(log_normalizer[part, None])
            # d logprob / d logits = onehot - p; d entropy / d logits = -p (log p + entropy)
            if with_entropy:
                slope = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
                grad_logits = log_p.exp_().mul_(slope).neg_()
            else:
                grad_logits = log_p.exp_().mul_(-grad_logprobs[part, None])
            local = targets[part] - ctx.first_row
            here = (local >= 0) & (local < weight.shape[0])
            grad_logits[torch.arange(len(local), device=local.device)[here], local[here]] += grad_logprobs[part][here]
            grad_logits = grad_logits.div_(ctx.temperature)
            grad_hidden[part] = grad_logits.to(weight.dtype) @ weight
            grad_weight.addmm_(grad_logits.T, rows.float())
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chosen(logits: torch.Tensor, targets: torch.Tensor, first_row: int) -> torch.Tensor:
    """The targets' logits, 0 where another shard holds the row."""
    local = targets - first_row
    here = (local >= 0) & (local < logits.shape[1])
    return logits.gather(1, local.where(here, torch.zeros_like(local))[:, None])[:, 0].where(
        here, torch.zeros((), device=logits.device)
    )


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values
