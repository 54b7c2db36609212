"""Ranks that are no processes: their ends of the control group in this one, with messages in a dictionary."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from spmd_rl.distributed.commands import FAN_OUT, ControlChannel, Message, MissingRanks, Pending
from spmd_rl.distributed.protocol import Combined

Do = Callable[[int, str, dict[str, Any]], Any]
"""A rank's answer to a verb: (rank, verb, arguments)."""


@dataclass
class Post:
    """Messages on their way, and what ranks wrote down."""

    messages: dict[tuple[int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    receipts: set[tuple[int, int]] = field(default_factory=set)
    said: dict[int, str] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of the largest message that each rank sent."""


class SimulatedLink:
    """A distributed.control_link.Link of one rank."""

    def __init__(self, rank: int, post: Post):
        self.rank, self.post = rank, post

    def send(self, message: bytes, rank: int) -> "SimulatedLink":
        self.post.messages[self.rank, rank].append(message)
        self.post.largest[self.rank] = max(self.post.largest[self.rank], len(message))
        return self

    def wait(self) -> None: ...

    def receive(self, rank: int) -> bytes:
        if not self.post.messages[rank, self.rank]:
            raise RuntimeError("the connection is closed")
        return self.post.messages[rank, self.rank].popleft()

    def expect_receipt(self, rank: int) -> SimpleNamespace:
        def by(deadline: float) -> bool:
            found = (rank, self.rank) in self.post.receipts
            self.post.receipts.discard((rank, self.rank))
            return found

        return SimpleNamespace(by=by)

    def give_receipt(self, rank: int) -> None:
        self.post.receipts.add((self.rank, rank))

    def leave_reason(self, reason: str) -> None:
        self.post.said[self.rank] = reason

    def reasons(self, ranks: list[int]) -> dict[int, str]:
        return {rank: self.post.said[rank] for rank in ranks if rank in self.post.said}


class SimulatedRanks:
    """Stand for all ranks but rank 0, and be its end of the control group, for controller.ranks.Ranks.

    `away`: ranks that do not arrive at a verb. `gone`: those that end before they answer.
    """

    def __init__(
        self,
        size: int,
        do: Do,
        fan_out: int = FAN_OUT,
        groups: Sequence[Sequence[int]] = (),
        away: Sequence[int] = (),
        gone: Sequence[int] = (),
        protocol: Mapping[str, Combined] | None = None,
    ):
        self.do, self.away, self.gone = do, away, gone
        self.mail = Post()
        self.channels = [
            ControlChannel(
                SimpleNamespace(rank=rank, size=size, started=time.monotonic()),  # type: ignore[arg-type]
                600.0,
                fan_out,
                groups,
                SimulatedLink(rank, self.mail),
                protocol,
            )
            for rank in range(size)
        ]
        self.seconds = 0.0
        """Processor time of all ranks but rank 0."""

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that rank 0 has sent and received."""
        return self.channels[0].bytes_moved

    def post(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> "SimulatedPending":
        """Give ranks a verb, as rank 0."""
        return SimulatedPending(self, verb, self.channels[0].post(verb, arguments, ranks, by_rank))

    def all(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Have ranks do a verb, rank 0 too where it is one of them; return their answer."""
        pending = self.post(verb, arguments, ranks, by_rank)
        pending.wait()
        own = pending.own_arguments
        return pending.answer(None if own is None else self.do(0, verb, own))


class SimulatedPending:
    """A verb on its way: the other ranks do it while rank 0 waits for them."""

    def __init__(self, ranks: SimulatedRanks, verb: str, pending: Pending):
        self.ranks, self.verb, self.pending = ranks, verb, pending
        self.own_arguments = pending.own_arguments
        self._got: dict[int, Message] = {}

    def wait(self) -> None:
        """Let the other ranks arrive."""
        started = time.process_time()
        channels, mail = self.ranks.channels, self.ranks.mail
        # A parent has a lower number than those below it.
        for rank, channel in enumerate(channels[1:], 1):
            if rank not in self.ranks.away and mail.messages[channel.parent, rank]:
                self._got[rank] = channel.take()
        for rank in sorted(self._got, reverse=True):
            try:
                channels[rank].confirm()
            except MissingRanks:
                del self._got[rank]
        self.ranks.seconds += time.process_time() - started
        self.pending.wait()

    def answer(self, own: Any = None) -> Any:
        """Let the other ranks do it, and return what all answer."""
        started = time.process_time()
        for rank, message in sorted(self._got.items(), reverse=True):
            channel = self.ranks.channels[rank]
            with suppress(MissingRanks):
                arguments = channel.arguments(message)
                if rank in self.ranks.gone:
                    continue
                if arguments is None:
                    channel.pass_on()
                else:
                    channel.answer(self.ranks.do(rank, self.verb, arguments))
        self.ranks.seconds += time.process_time() - started
        return self.pending.answer(own)
