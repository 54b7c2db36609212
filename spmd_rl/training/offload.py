"""Take what the engine does not need off the device while it holds it."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from spmd_rl.platforms import current


class Releasable:
    """Hold storages whose contents nobody needs for a while: their memory goes back, their tensors stay."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self.released = False

    def release(self) -> None:
        if not self.released:
            for tensor in self.tensors:
                tensor.untyped_storage().resize_(0)
            self.released = True

    def restore(self) -> None:
        """Give the storages back their sizes; what they hold is undefined until somebody writes it."""
        if self.released:
            for tensor, size in zip(self.tensors, self.sizes, strict=True):
                tensor.untyped_storage().resize_(size)
            self.released = False


class Offloaded:
    """Hold storages whose contents wait on the host; on a CPU they are there already."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors if current().offloads else []
        self.storages = Releasable(self.tensors)
        self.on_host: list[torch.Tensor] = []

    def offload(self) -> int:
        """Move to the host; returns the bytes moved."""
        if self.storages.released or not self.tensors:
            return 0
        if not self.on_host:
            self.on_host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in self.tensors]
        for tensor, host in zip(self.tensors, self.on_host, strict=True):
            host.copy_(tensor, non_blocking=True)
        current().synchronize()
        self.storages.release()
        return sum(self.storages.sizes)

    def onload(self) -> int:
        """Move back to the device; returns the bytes moved."""
        if not self.storages.released:
            return 0
        self.storages.restore()
        for tensor, host in zip(self.tensors, self.on_host, strict=True):
            tensor.copy_(host, non_blocking=True)
        current().synchronize()
        return sum(self.storages.sizes)


def gradient_buffers(wrapped: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Return Megatron's contiguous gradient buffers of this rank."""
    return [buffer.grad_data for buffer in _buffers(wrapped)]


def parameter_buffers(wrapped: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Return Megatron's contiguous parameter buffers of this rank."""
    return [buffer.param_data for buffer in _buffers(wrapped)]


def _buffers(wrapped: Sequence[DistributedDataParallel]) -> list[Any]:
    return [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
