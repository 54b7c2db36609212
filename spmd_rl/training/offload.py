"""Take what the engine does not need off the device while it holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spmd_rl.platforms import current

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

_BLOCK_BYTES = 1 << 30
_LEAST_BYTES = 1 << 20


def block_sizes(total: int) -> list[int]:
    """Part bytes into blocks of pinned memory, the largest first.

    Each is a power of two, to which torch rounds a block up: hundreds of tensors in blocks of their own take up to
    twice the memory.
    """
    sizes, left = [], -(-total // _LEAST_BYTES) * _LEAST_BYTES
    while left:
        sizes.append(min(_BLOCK_BYTES, 1 << (left.bit_length() - 1)))
        left -= sizes[-1]
    return sizes


def pieces(tensors: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """Lay tensors of these sizes into blocks, one after another: (tensor, its byte, block, its byte, bytes)."""
    cuts, block, at = [], 0, 0
    for tensor, size in enumerate(tensors):
        start = 0
        while start < size:
            if at == blocks[block]:
                block, at = block + 1, 0
            count = min(size - start, blocks[block] - at)
            cuts.append((tensor, start, block, at, count))
            start, at = start + count, at + count
    return cuts


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
        self._pieces: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        """Of each storage, from which byte on, where on the host."""

    def offload(self) -> None:
        """Move to the host."""
        if self._storages.released or not self._whole:
            return
        if not self._pieces:
            blocks = [
                torch.empty(size, dtype=torch.uint8, pin_memory=not self._whole[0].is_cpu)
                for size in block_sizes(sum(map(len, self._whole)))
            ]
            cuts = pieces(list(map(len, self._whole)), list(map(len, blocks)))
            self._pieces = [
                (self._whole[tensor], start, blocks[block][at : at + size]) for tensor, start, block, at, size in cuts
            ]
        for tensor, start, host in self._pieces:
            host.copy_(tensor[start : start + len(host)], non_blocking=True)
        current().synchronize()
        self._storages.release()

    def onload(self) -> None:
        """Move back to the device."""
        if not self._storages.released:
            return
        self._storages.restore()
        for tensor, start, host in self._pieces:
            tensor[start : start + len(host)].copy_(host, non_blocking=True)
        current().synchronize()


def gradient_buffers(wrapped: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Return Megatron's contiguous gradient buffers of this rank."""
    return [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
