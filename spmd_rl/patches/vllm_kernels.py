"""What vLLM computes on a CPU, by faster kernels: those of its library that it does not call there, and one of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F

from spmd_rl.platforms.cpu_gumbel import Draw, draw

_left = False


@contextmanager
def left_as_they_are() -> Iterator[None]:
    """Compute inside as vLLM does by itself, for a comparison."""
    global _left  # noqa: PLW0603 (a process has one vLLM)
    _left = True
    try:
        yield
    finally:
        _left = False


class _Norm(Protocol):
    """Stand for vLLM's RMSNorm."""

    weight: torch.Tensor
    pass_weight: bool
    pass_weight_add: bool
    variance_epsilon: float
    variance_size_override: int | None


Normed: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def norm_in_one_pass(original: Callable[..., Normed]) -> Callable[..., Normed]:
    """Norm rows, and add the residual, in the kernel that vLLM calls on accelerators: it writes where it reads."""

    def forward_native(self: _Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        weighed = self.pass_weight if residual is None else self.pass_weight_add
        fits = (
            weighed
            and not _left
            and self.variance_size_override is None
            and self.weight.dtype == x.dtype
            and x.is_contiguous()
        )
        if not fits or not (residual is None or residual.is_contiguous()):
            return original(self, x, residual)
        if residual is None:
            normed = torch.empty_like(x)
            torch.ops._C.rms_norm(normed, x, self.weight, self.variance_epsilon)
            return normed
        torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual

    return forward_native


def gate_in_place(original: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiply the gate by the other half where it lies."""

    def forward_native(x: torch.Tensor) -> torch.Tensor:
        if _left:
            return original(x)
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]).mul_(x[..., half:])

    return staticmethod(forward_native)


def draw_quickly(original: Callable[..., object]) -> Callable[..., object]:
    """Put the faster kernel in the place of the one that a sampler is about to call; the library is loaded by then."""
    pair: list[Draw] = []

    def forward_cpu(*args: object, **options: object) -> object:
        kernels = torch.ops._C
        if not pair:
            pair.extend((draw(kernels.fused_gumbel_argmax), kernels.fused_gumbel_argmax))
        kernels.fused_gumbel_argmax = pair[_left]
        return original(*args, **options)

    return forward_cpu
