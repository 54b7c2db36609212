"""Gate channels and keep nothing of it but the input: what else the gradients need is computed again, bit for bit."""

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2I], gate before up -> silu(gate) * up [..., I]."""
    return _Gated.apply(x)


def weighted_swiglu(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """x [T, 2I], gate before up; probs [T] -> silu(gate) * up * probs [T, I], in the dtype of x."""
    return _Weighted.apply(x, probs)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _slope(x, grad)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, probs)
        gate, up = x.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        return (inner * probs[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, probs = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        grad = grad.to(torch.promote_types(x.dtype, probs.dtype))
        weight = (grad * inner).sum(-1).to(probs.dtype)
        return _slope(x, (grad * probs[:, None]).to(x.dtype)), weight


def _slope(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x for that of silu(gate) * up."""
    gate, up = x.chunk(2, dim=-1)
    found = torch.empty_like(x)
    of_gate, of_up = found.chunk(2, dim=-1)
    torch.mul(F.silu(gate), grad, out=of_up)
    torch.ops.aten.silu_backward(grad * up, gate, grad_input=of_gate)
    return found
