"""Take what the engine does not need off the device while it holds it."""

from collections.abc import Sequence

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

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """`tensors`: what lies in the storages, which several may share."""
        self.count = len(tensors)
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if current().offloads}
        self._whole = [
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in storages.values()
        ]
        self._storages = Releasable(self._whole)
        self._on_host: list[torch.Tensor] = []

    def offload(self) -> None:
        """Move to the host."""
        if self._storages.released or not self._whole:
            return
        if not self._on_host:
            self._on_host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in self._whole]
        for tensor, host in zip(self._whole, self._on_host, strict=True):
            host.copy_(tensor, non_blocking=True)
        current().synchronize()
        self._storages.release()

    def onload(self) -> None:
        """Move back to the device."""
        if not self._storages.released:
            return
        self._storages.restore()
        for tensor, host in zip(self._whole, self._on_host, strict=True):
            tensor.copy_(host, non_blocking=True)
        current().synchronize()


def gradient_buffers(wrapped: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Return Megatron's contiguous gradient buffers of this rank."""
    return [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
