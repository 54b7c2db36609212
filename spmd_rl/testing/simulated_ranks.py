"""Ranks that are no processes: their ends of the control group in this one, with messages in a dictionary."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from spmd_rl.distributed.commands import FAN_OUT, ControlChannel, MissingRanks

Do = Callable[[int, str, dict[str, Any]], Any]
"""What a rank answers to a verb: (rank, verb, arguments)."""


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
    """All ranks but rank 0, which does not wait for them: they have done a verb when `post` comes back.

    `away`: ranks that do not arrive at it. `gone`: those that end before they answer.
    """

    def __init__(
        self,
        size: int,
        do: Do,
        fan_out: int = FAN_OUT,
        groups: Sequence[Sequence[int]] = (),
        away: Sequence[int] = (),
        gone: Sequence[int] = (),
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
            )
            for rank in range(size)
        ]
        self.seconds = 0.0
        """Processor time of rank 0."""

    def all(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Have ranks do a verb, and return what rank 0 makes of their answers."""
        before = time.process_time()
        pending = self.channels[0].post(verb, arguments, ranks, by_rank)
        self.seconds += time.process_time() - before
        got = {}
        # A parent has a lower number than those below it.
        for rank, channel in enumerate(self.channels[1:], 1):
            if rank not in self.away and self.mail.messages[channel.parent, rank]:
                got[rank] = channel.take()
        for rank in sorted(got, reverse=True):
            try:
                self.channels[rank].confirm()
            except MissingRanks:
                del got[rank]
        before = time.process_time()
        pending.wait()
        self.seconds += time.process_time() - before
        for rank, message in sorted(got.items(), reverse=True):
            try:
                if rank not in self.gone:
                    own = self.channels[rank].arguments(message)
                    self.channels[rank].pass_on([] if own is None else [self.do(rank, verb, own)])
            except MissingRanks:
                continue
        before = time.process_time()
        answers = pending.answers(None if pending.own_arguments is None else self.do(0, verb, pending.own_arguments))
        self.seconds += time.process_time() - before
        return answers
