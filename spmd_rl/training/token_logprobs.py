"""Log-probabilities and entropies of chosen tokens from a vocabulary-sharded output layer, in chunks.

The logits of a micro-batch never exist at once: each chunk of `chunk` tokens makes its own [chunk, V/tp] and drops it.
The backward pass, which follows, begins with the chunk that was last and finds it kept; it makes the others' again.
"""

from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.platforms import current


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    first_row: int,
    group: dist.ProcessGroup | None,
    chunk: int,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural-log probabilities of `targets` and entropies, fp32, of softmax(hidden @ weight.T / temperature).

    hidden [N, H]; weight [V/tp, H], of which the first `rows` are no padding; targets [N], ids in the whole vocabulary;
    first_row: the id of this shard's first row. Returns ([N], [N]), equal on all ranks of `group`; the gradient of
    `hidden` is this shard's part only (the caller sums it over the group). That of a weight in training goes straight
    into the float32 buffer that sums it over micro-batches (`main_grad`).
    """
    rows = weight.shape[0] if rows is None else rows
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, first_row, group, chunk, rows)


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
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = weight[:rows]
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normalizer = torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], used, temperature)  # [C, V/tp]
            peak = _reduce(logits.amax(-1), group, dist.ReduceOp.MAX)  # [C]
            chosen = _chosen(logits, targets[part], first_row)  # [C]
            weights = logits - peak[:, None]
            weights.exp_()
            total = weights.sum(-1)  # [C]
            expected = weights.mul_(logits).sum(-1)  # [C], without another [C, V/tp]
            total, chosen, expected = _reduce(torch.stack((total, chosen, expected)), group, dist.ReduceOp.SUM)
            log_normalizer[part] = peak + total.log()
            logprobs[part] = chosen - log_normalizer[part]
            entropy[part] = log_normalizer[part] - expected / total
            ctx.kept = logits if part.stop >= count else None  # of the last chunk; freed on return where none learns
            del logits, weights
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.temperature, ctx.first_row, ctx.chunk, ctx.rows = temperature, first_row, chunk, rows
        ctx.summed = getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        used, add_product = weight[: ctx.rows], current().add_product
        grad_hidden = torch.empty_like(hidden)
        summed = torch.zeros_like(weight, dtype=torch.float32) if ctx.summed is None else ctx.summed
        for start in reversed(range(0, hidden.shape[0], ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            kept, ctx.kept = ctx.kept, None  # the last chunk's, in the first pass backward
            logits = _logits(hidden[part], used, ctx.temperature) if kept is None else kept
            log_p = logits.sub_(log_normalizer[part, None])
            # d logprob / d logits = onehot - p; d entropy / d logits = -p (log p + entropy)
            if grad_entropy is not None:
                slope = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
                grad_logits = log_p.exp_().mul_(slope).neg_()
            else:
                grad_logits = log_p.exp_().mul_(-grad_logprobs[part, None])
            local, here = _local(targets[part], ctx.first_row, ctx.rows)
            grad_logits.scatter_add_(1, local[:, None], (grad_logprobs[part] * here)[:, None])
            grad_logits = grad_logits.div_(ctx.temperature)
            grad_hidden[part] = grad_logits.to(weight.dtype) @ used
            if ctx.needs_input_grad[1]:
                add_product(summed[: ctx.rows], grad_logits.T, hidden[part])
        grad_weight = summed.to(weight.dtype) if ctx.summed is None else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = current().logits(hidden, weight).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chosen(logits: torch.Tensor, targets: torch.Tensor, first_row: int) -> torch.Tensor:
    """The targets' logits, 0 where another shard holds the row."""
    local, here = _local(targets, first_row, logits.shape[1])
    return logits.gather(1, local[:, None])[:, 0].where(here, torch.zeros((), device=logits.device))


def _local(targets: torch.Tensor, first_row: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' rows in this shard, any where another shard holds it; and where this one does."""
    local = targets - first_row
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values
