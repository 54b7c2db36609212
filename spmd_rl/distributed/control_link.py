"""Messages between two ranks of the control group, over gloo."""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from spmd_rl.distributed.world import World

_REASON_SECONDS = 1.0
"""A rank that gave up may take so long to write down why, once others see that it did."""


class Waits(Protocol):
    """A send that was begun and can be waited for."""

    def wait(self) -> None: ...


class Receipt(Protocol):
    """A rank's receipt of a message, as it is waited for."""

    def by(self, deadline: float) -> bool:
        """Wait for it until time.monotonic() is `deadline`; return True where it came."""


class Link(Protocol):
    """Carry messages to and from this rank. What ends in RuntimeError: the other rank is gone."""

    def send(self, message: bytes, rank: int) -> Waits:
        """Begin to send."""

    def receive(self, rank: int) -> bytes: ...

    def expect_receipt(self, rank: int) -> Receipt: ...

    def give_receipt(self, rank: int) -> None: ...

    def leave_reason(self, reason: str) -> None:
        """Write down, where others find it, why this rank gives up; empty: it looks for that."""

    def reasons(self, ranks: list[int]) -> dict[int, str]:
        """Return why some of `ranks` gave up, of those that said so."""


class GlooLink:
    """A Link over World.control; reasons are kept in World.store, which outlives the ranks."""

    def __init__(self, world: World):
        self.rank, self.group, self.store = world.rank, world.control, world.store

    def send(self, message: bytes, rank: int) -> "_Sent":
        return _Sent(message, rank, self.group)

    def receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=rank, group=self.group)
        body = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(body, src=rank, group=self.group)
        return body.numpy().tobytes()

    def expect_receipt(self, rank: int) -> "_Receipt":
        return _Receipt(rank, self.group)

    def give_receipt(self, rank: int) -> None:
        dist.send(torch.ones(1, dtype=torch.uint8), dst=rank, group=self.group)

    def leave_reason(self, reason: str) -> None:
        with suppress(RuntimeError):  # without the store it is in this rank's own error alone
            self.store.set(f"gave up/{self.rank}", reason)

    def reasons(self, ranks: list[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        deadline = time.monotonic() + _REASON_SECONDS
        with suppress(RuntimeError):
            while len(found) < len(ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
                left = [rank for rank in ranks if rank not in found and self.store.check([f"gave up/{rank}"])]
                said = {rank: self.store.get(f"gave up/{rank}").decode() for rank in left}
                found |= {rank: words for rank, words in said.items() if words}
                if "" in said.values():  # one looks for the reasons of others itself
                    deadline = time.monotonic() + _REASON_SECONDS
        return found


class _Sent:
    def __init__(self, message: bytes, rank: int, group: dist.ProcessGroup):
        # The tensors must stay alive until both works are done.
        self._length = torch.tensor([len(message)], dtype=torch.int64)
        self._body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._works = [dist.isend(part, dst=rank, group=group) for part in (self._length, self._body)]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Receipt:
    def __init__(self, rank: int, group: dist.ProcessGroup):
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._work = dist.irecv(self._byte, src=rank, group=group)

    def by(self, deadline: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError:  # gloo closes all connections of the group when a wait takes too long
            if time.monotonic() < deadline:
                raise
            return False
        return True
