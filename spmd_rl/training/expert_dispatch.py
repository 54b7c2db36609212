"""The way of tokens to their experts and back: sorted by expert, sent to the ranks that have them, and sorted again.

Megatron's own steps, in their order, without its masks as indices: the device is waited for once a layer, where ranks
share experts and have to know how many tokens each will get, and not at all where a rank has all of them.
"""

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import FunctionCtx

from spmd_rl.platforms.grouped_matmul import ExpertCounts


class TokenDispatcher(MoETokenDispatcher):
    """Bring T tokens, each with `k` experts of E, to this rank's experts."""

    def __init__(self, local: int, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config, pg_collection)
        self.local, self.k = local, config.moe_router_topk
        self.alone = self.tp_size * self.ep_size == 1
        self.load: torch.Tensor | None = None
        """Tokens that this rank's part of the batch sent to each expert of the model [E], since it was last None."""

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., H], routing_map and probs [T, E] -> tokens and their weights by expert [T * k, H], [T * k]."""
        self.shape, self.dtype = hidden.shape, probs.dtype
        hidden = hidden.view(-1, self.shape[-1])
        # Experts of a token in ascending order. Sorts of floats have kernels everywhere.
        chosen = routing_map.float().topk(self.k, dim=1).indices.sort(dim=1).values  # [T, k]
        order = chosen.flatten().float().sort(stable=True).indices  # [T * k]
        self.order, self.inverse = order, _inverse(order)
        counts = routing_map.sum(0)
        if torch.is_grad_enabled():
            self.load = counts if self.load is None else self.load + counts
        self._share(counts)
        return (
            _Spread.apply(hidden, self.order, self.inverse, self.k),
            probs.gather(1, chosen).flatten().index_select(0, order),
        )

    def _share(self, counts: torch.Tensor) -> None:
        """Make out how many tokens go where: the one place that waits for the device."""
        if self.alone:
            self.counts = ExpertCounts(counts)
            return
        everyones = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
        # From here on all is on the host.
        on_host = np.array(everyones.tolist()).reshape(self.ep_size, self.tp_size, self.ep_size, self.local)
        me = self.ep_group.rank()
        self.sent = on_host[me, self.tp_rank].sum(1).tolist()
        arriving = on_host[:, :, me].transpose(1, 0, 2)  # [tp, ep, local]
        self.received, self.gathered = arriving[self.tp_rank].sum(1).tolist(), arriving.sum((1, 2)).tolist()
        by_expert, order = arriving.sum((0, 1)), _by_column(arriving.reshape(-1, self.local))
        made = (by_expert, order, np.argsort(order))
        own, *self.arrived = (torch.from_numpy(one).to(counts.device, non_blocking=True) for one in made)
        self.counts = ExpertCounts(own, by_expert.tolist())

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each to the rank that has its expert."""
        if self.alone:
            return tokens, probs
        return (
            all_to_all(self.ep_group, tokens, self.received, self.sent),
            all_to_all(self.ep_group, probs, self.received, self.sent),
        )

    def dispatch_postprocess(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, ExpertCounts, torch.Tensor]:
        """Bring the tokens of all ranks that share these experts together, sorted by expert."""
        if self.alone:
            return tokens, self.counts, probs
        if self.tp_size > 1:
            tokens, probs = (
                gather_from_sequence_parallel_region(part, group=self.tp_group, output_split_sizes=self.gathered)
                for part in (tokens, probs)
            )
        if self.local > 1:
            tokens, probs = _Spread.apply(tokens, *self.arrived, 1), probs.index_select(0, self.arrived[0])
        return tokens, self.counts, probs

    def combine_preprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Undo dispatch_postprocess: the parts that the ranks have of an expert's result are summed."""
        if not self.alone and self.local > 1:
            hidden = _Combine.apply(hidden, *self.arrived, 1)
        if self.tp_size > 1:
            summed = reduce_scatter_to_sequence_parallel_region(
                hidden.to(self.dtype), group=self.tp_group, input_split_sizes=self.gathered
            )
            hidden = summed.to(hidden.dtype)
        return hidden

    def token_combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send each back."""
        return hidden if self.alone else all_to_all(self.ep_group, hidden, self.sent, self.received)

    def combine_postprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Sum what the experts of each token say -> [..., H]."""
        return _Combine.apply(hidden, self.order, self.inverse, self.k).view(self.shape)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _by_column(sizes: np.ndarray) -> np.ndarray:
    """Return the order in which chunks that lie row by row, of these sizes [R, C], lie column by column."""
    starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
    sizes, starts = sizes.T.ravel(), starts.T.ravel()
    return np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)


class _Spread(torch.autograd.Function):
    """Copy rows [T, H], k times each, in an order -> [T * k, H]; without the atomic sums of index_select's gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _sum(grad, *ctx.saved_tensors, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """Undo _Spread, as its gradient does: [T * k, H] -> sums of k [T, H]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sum(x, inverse, k)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order // ctx.k), None, None, None


def _sum(x: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
    back = x.index_select(0, inverse)
    return back if k == 1 else back.unflatten(0, (-1, k)).sum(1)
