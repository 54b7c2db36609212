"""Products of the tokens of each expert with its own weight, for every device and dtype that torch has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch.autograd.function import FunctionCtx


class ExpertCounts:
    """Hold how many tokens each of E experts has: on the device, and on the host where they are there already."""

    def __init__(self, on_device: torch.Tensor, on_host: list[int] | None = None):
        """on_device [E], int64."""
        self.on_device = on_device
        self._host = on_host

    @property
    def on_host(self) -> list[int]:
        """The same numbers; the first call waits for the device, unless they were brought over before."""
        if self._host is None:
            self._host = self.on_device.tolist()
        return self._host


def looped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: ExpertCounts) -> torch.Tensor:
    """Multiply x [T, K], which lies expert by expert, with weights [E, N, K] -> [T, N]; one product an expert."""
    return _Looped.apply(x, weight, counts.on_host)


class _Looped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        out = x.new_empty(x.shape[0], weight.shape[1])
        for part, own in zip(ctx.parts, weight, strict=True):
            if part.start < part.stop:
                torch.mm(x[part], own.t(), out=out[part])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for part, own, own_grad in zip(ctx.parts, weight, grad_weight, strict=True):
            if part.start < part.stop:
                torch.mm(grad[part], own, out=grad_x[part])
                torch.mm(grad[part].t(), x[part], out=own_grad)
            else:
                own_grad.zero_()
        return grad_x, grad_weight, None


class GroupedKernels(NamedTuple):
    """Two products of a device that take all experts at once, and read on it how many rows each has."""

    rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, K], weight [E, K, N], counts [E]) -> [T, N]."""
    sums: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [N, T], y [T, K], counts [E]) -> [E, N, K]: for each expert the product over its own T."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [T, K], weight [E, N, K], counts [E] -> [T, N]."""
        return _Grouped.apply(x, weight, counts, self)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, kernels: GroupedKernels
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.kernels = kernels
        return kernels.rows(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weight = ctx.kernels.sums(grad.t(), x, counts)
        # No vendor says what an expert without tokens has in there.
        grad_weight.masked_fill_((counts == 0)[:, None, None], 0.0)
        return ctx.kernels.rows(grad, weight, counts), grad_weight, None, None
