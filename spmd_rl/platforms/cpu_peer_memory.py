"""Read the memory of other ranks on the same machine: one copy by the kernel instead of a trip through sockets.

Uses process_vm_readv of Linux. Where it isn't there or not allowed (other systems, some containers), no rank is in
reach, and messages travel as they do between machines.
"""

import ctypes
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Index = tuple[int, ...]

# The kernel takes so many pieces in a call, and somewhat under 2 GiB.
_PIECES, _CALL_BYTES = 1024, 1 << 30
_CALL = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _CALL is not None:
    _CALL.restype = ctypes.c_ssize_t
    _CALL.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


class Place(NamedTuple):
    """A tensor's place in the memory of a process."""

    address: int
    strides: Index
    """In elements."""


class PeerMemory:
    """The tensors that other ranks of a group have published, for those ranks whose memory can be read."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], barrier: Callable[[], None]) -> None:
        """Find out, in a collective, who can read whom. `gather` returns what each rank of the group passes."""
        self.rank, self._gather, self._barrier = rank, gather, barrier
        self._places: list[Mapping[str, Place]] = []
        token = np.frombuffer(secrets.token_bytes(16), dtype=np.uint8).copy()
        everyone = self._gather((os.getpid(), token.ctypes.data, token.tobytes()))
        self._pids = [pid for pid, _, _ in everyone]
        mine = [
            other != rank and self._holds(pid, address, said) for other, (pid, address, said) in enumerate(everyone)
        ]
        self._reads: list[list[bool]] = self._gather(mine)

    def reaches(self, reader: int, owner: int) -> bool:
        """Return whether `reader` can read `owner`'s memory; all ranks give the same answer."""
        return self._reads[reader][owner]

    @property
    def any(self) -> bool:
        """Return whether any rank can read any other's memory."""
        return any(map(any, self._reads))

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Say, in a collective, where this rank's tensors lie. They must not change until `release`."""
        everyone = self._gather({name: (t.data_ptr(), t.stride()) for name, t in tensors.items()})
        self._places = [
            {name: Place(address, tuple(strides)) for name, (address, strides) in places.items()} for places in everyone
        ]

    def release(self) -> None:
        """Wait, in a collective, until everybody has read what was wanted."""
        self._barrier()

    def read(self, owner: int, parts: Sequence[tuple[str, Index, torch.Tensor]]) -> None:
        """Copy parts of another rank's tensors: (its parameter, first index there, view here that is filled)."""
        addresses, sizes = [], []
        for name, at, view in parts:
            place = self._places[owner][name]
            there = place.address + view.itemsize * sum(a * s for a, s in zip(at, place.strides, strict=True))
            lead = len(place.strides) - view.dim()
            here_and_there, size = _runs(view, there, place.strides[lead:])
            addresses.append(here_and_there)
            sizes.append(np.full(len(here_and_there), size, dtype=np.uint64))
        if addresses:
            self._copy(self._pids[owner], np.concatenate(addresses), np.concatenate(sizes))

    def _copy(self, pid: int, addresses: np.ndarray, sizes: np.ndarray) -> None:
        """addresses [n, 2] (here, there), sizes [n] in bytes."""
        first = 0
        while first < len(sizes):
            ends = np.cumsum(sizes[first : first + _PIECES])
            count = max(1, int(np.searchsorted(ends, _CALL_BYTES, side="right")))
            here = np.stack((addresses[first : first + count, 0], sizes[first : first + count]), 1)
            there = np.stack((addresses[first : first + count, 1], sizes[first : first + count]), 1)
            wanted = int(ends[count - 1])
            got = 0
            if wanted > _CALL_BYTES:  # one long piece
                while got < wanted:
                    step = min(_CALL_BYTES, wanted - got)
                    shift = np.array([[got, 0]], dtype=np.uint64)
                    here[0, 1] = there[0, 1] = step
                    _readv(pid, here + shift, there + shift, step)
                    got += step
            else:
                _readv(pid, here, there, wanted)
            first += count

    def _holds(self, pid: int, address: int, said: bytes) -> bool:
        found = np.zeros(len(said), dtype=np.uint8)
        try:
            _readv(
                pid,
                np.array([[found.ctypes.data, len(said)]], dtype=np.uint64),
                np.array([[address, len(said)]], dtype=np.uint64),
                len(said),
            )
        except OSError:
            return False
        return found.tobytes() == said


def _runs(view: torch.Tensor, there: int, strides: Index) -> tuple[np.ndarray, int]:
    """Addresses [n, 2] (here, there) of the longest runs that lie in one piece on both sides, and their bytes."""
    shape, size = tuple(view.shape), view.itemsize
    inner, run = view.dim(), 1
    while inner and all(s[inner - 1] == run or shape[inner - 1] == 1 for s in (view.stride(), strides)):
        run *= shape[inner - 1]
        inner -= 1
    starts = np.zeros((math.prod(shape[:inner]), 2), dtype=np.uint64) + np.array([[view.data_ptr(), there]], np.uint64)
    if inner:
        index = np.indices(shape[:inner], dtype=np.int64).reshape(inner, -1)
        for column, steps in enumerate((view.stride()[:inner], strides[:inner])):
            starts[:, column] += (np.array(steps, dtype=np.int64) @ index * size).astype(np.uint64)
    return starts, run * size


def _readv(pid: int, here: np.ndarray, there: np.ndarray, wanted: int) -> None:
    """Raises OSError where the kernel doesn't know it, doesn't allow it, or has nothing there."""
    if _CALL is None:
        raise OSError("no process_vm_readv on this system")
    here, there = np.ascontiguousarray(here), np.ascontiguousarray(there)
    got = _CALL(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if got != wanted:
        error = ctypes.get_errno()
        raise OSError(error, f"read {got} of {wanted} bytes of process {pid}: {os.strerror(error)}")
