"""Context parallelism: a group of ranks shares the tokens of a micro-batch, and inside attention the heads instead.

Two all-to-alls around each attention do the change, as in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509):
attention then sees whole sequences, in whatever way they are laid out.
"""

import math
from typing import Any

import torch
import torch.distributed as dist


def share_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some tokens of all heads -> all tokens of some heads: each [T/ranks, heads, d] -> [T, heads/ranks, d].

    Key-value heads that the ranks don't divide are repeated: each rank gets those of its query heads.
    """
    ranks = group.size()
    repeats = math.lcm(key.shape[1], ranks) // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    # One message carries all three.
    parts = [part.unflatten(1, (ranks, -1)).transpose(0, 1) for part in (query, key, value)]  # [ranks, T/ranks, h, d]
    widths = [part.shape[2] * part.shape[3] for part in parts]
    received = _AllToAll.apply(torch.cat([part.flatten(2) for part in parts], dim=-1), group).flatten(0, 1)
    query, key, value = (
        whole.unflatten(1, part.shape[2:]) for whole, part in zip(received.split(widths, dim=-1), parts, strict=True)
    )
    return query, key, value


def share_tokens(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens of some heads -> some tokens of all heads: [T, heads/ranks, d] -> [T/ranks, heads, d]."""
    return _AllToAll.apply(out.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


def of_all_tokens(own: torch.Tensor, places: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Values of this rank's tokens [K, n], which are those at `places` [n] of `count` -> of all ranks' [K, count].

    The loss of all tokens can then be computed on every rank, and its gradient goes into the rank's own tokens only:
    summed over the ranks, each token counts once.
    """
    return _OfAllTokens.apply(own, places, count, group)


class _AllToAll(torch.autograd.Function):
    """Block i of the first dimension goes to rank i of the group. The way back of a gradient is the same."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


class _OfAllTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, places: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(own.shape[0], count)
        whole[:, places] = own
        if count:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return grad[:, places], None, None, None
