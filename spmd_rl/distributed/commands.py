"""How rank 0 speaks to the ranks: verbs out, small answers back, as msgpack over gloo.

A verb goes to every rank, each says that it has it, and only then rank 0 begins it itself: a rank that never arrives is
therefore known by name before anybody waits for it inside a collective.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import WAITS, current_status, doing, set_status
from spmd_rl.distributed.world import World


class MissingRanks(RuntimeError):
    """Ranks that did not arrive at a verb in time."""


class ControlChannel:
    """One rank's end of the control group."""

    def __init__(self, world: World, timeout_seconds: float):
        self.world = world
        self.timeout_seconds = timeout_seconds
        self.bytes_moved = 0

    # Rank 0

    def send(self, verb: str, arguments: dict[str, Any]) -> None:
        """Rank 0: give every other rank the verb, and wait until each has it.

        Raises MissingRanks, naming ranks and verb, when the control timeout passes.
        """
        place = current_status()
        message = msgspec.msgpack.encode((verb, arguments, place.step, place.phase))
        others = range(1, self.world.size)
        arrived = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
        receipts: dict[int, dist.Work] = {}
        sends = []
        for rank in others:
            with _naming(rank, f"at verb '{verb}'"):
                receipts[rank] = dist.irecv(arrived[rank], src=rank, group=self.world.control)
                sends.append(self._post(message, rank))
        deadline = time.monotonic() + self.timeout_seconds
        with doing(f"{WAITS}all ranks to be at {verb}"):
            missing = [rank for rank in others if not _finished_by(receipts[rank], deadline)]
        if missing:
            raise MissingRanks(
                f"{ranks_named(missing)} did not arrive at verb '{verb}' within {self.timeout_seconds:g} s "
                f"(run.control_timeout_seconds): its last verb may still run there, or the process is stopped"
            )
        with doing(f"{WAITS}all ranks to have {verb}"):
            for header, body, _keep in sends:
                header.wait()
                body.wait()

    def collect(self, own: Any) -> list[Any]:
        """Rank 0: the answers of all ranks, in rank order."""
        answers = [own]
        for rank in range(1, self.world.size):
            length = torch.zeros(1, dtype=torch.int64)
            with _naming(rank, "before its answer"), doing(f"{WAITS}the answer of rank {rank}"):
                dist.recv(length, src=rank, group=self.world.control)
                body = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(body, src=rank, group=self.world.control)
            self.bytes_moved += int(length)
            answers.append(msgspec.msgpack.decode(body.numpy().tobytes()))
        return answers

    # The other ranks

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for rank 0's next verb, and say that it is here."""
        length = torch.zeros(1, dtype=torch.int64)
        with _naming(0, "before its next verb"), doing(f"{WAITS}the next verb"):
            dist.recv(length, src=0, group=self.world.control)
            body = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(body, src=0, group=self.world.control)
        verb, arguments, step, phase = msgspec.msgpack.decode(body.numpy().tobytes())
        set_status(step=step, phase=phase)
        with doing(f"{WAITS}rank 0 to hear that it is here"):
            dist.send(torch.ones(1, dtype=torch.uint8), dst=0, group=self.world.control)
        return verb, arguments

    def answer(self, value: Any) -> None:
        """Give rank 0 this rank's answer."""
        header, body, _keep = self._post(msgspec.msgpack.encode(value), 0)
        with doing(f"{WAITS}rank 0 to take its answer"):  # which it does after its own part of the verb
            header.wait()
            body.wait()

    def _post(self, message: bytes, rank: int) -> tuple[dist.Work, dist.Work, tuple[torch.Tensor, torch.Tensor]]:
        """Start sending; the tensors must stay alive until both works are done."""
        length = torch.tensor([len(message)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self.bytes_moved += len(message)
        return (
            dist.isend(length, dst=rank, group=self.world.control),
            dist.isend(body, dst=rank, group=self.world.control),
            (length, body),
        )


@contextmanager
def _naming(rank: int, when: str) -> Iterator[None]:
    """gloo knows a peer that is gone by its address only."""
    try:
        yield
    except RuntimeError as error:
        raise MissingRanks(f"rank {rank} is gone {when}: its process or its node ended, see there ({error})") from error


def _finished_by(work: dist.Work, deadline: float) -> bool:
    try:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:
        return False
    return True
