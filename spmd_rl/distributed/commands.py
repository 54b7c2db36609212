"""Rank 0's channel to the ranks: verbs out, small answers back, as msgpack, along a tree.

A rank that gets a verb hands its children their part of it, waits until each has it, and only then says so to its
parent: a rank that never arrives is known by name before rank 0 waits for it inside a collective. Answers come back the
same way, and become one where they meet. Rank 0 sends and receives as many messages as it has children, whatever the
world.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NoReturn

import msgspec

from spmd_rl.distributed.control_link import GlooLink, Link, Receipt, Waits
from spmd_rl.distributed.protocol import GATHERED, Combined
from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import WAITS, current_status, doing, set_status
from spmd_rl.distributed.world import World

FAN_OUT = 8

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class MissingRanks(RuntimeError):
    """Ranks that did not arrive at a verb in time, or that are gone."""


class Message(msgspec.Struct, array_like=True):
    """A verb on its way to a rank and those below it."""

    verb: str
    step: int
    phase: str
    until: float
    """When a rank gives up on its children, in seconds since the ranks met (World.started)."""
    ranks: list[int] | None
    """Those that do the verb, in the tree's order; None: all."""
    arguments: msgspec.Raw
    """For all of them."""
    parts: list[msgspec.Raw]
    """More arguments, each rank's own, in the order of the ranks; empty: there are none."""

    def for_branch(self, branch: Sequence[int], start: int) -> "Message | None":
        """Return what goes to a branch of the tree, which begins `start` ranks behind this message's first.

        None: no rank of it does the verb.
        """
        if self.ranks is None:
            ranks, parts = None, self.parts[start : start + len(branch)]
        else:
            inside = frozenset(branch)
            chosen = [number for number, rank in enumerate(self.ranks) if rank in inside]
            ranks = [self.ranks[number] for number in chosen]
            parts = [self.parts[number] for number in chosen] if self.parts else []
            if not ranks:
                return None
        return msgspec.structs.replace(self, ranks=ranks, parts=parts)


def branches(ranks: Sequence[int], fan_out: int) -> list[Sequence[int]]:
    """Part the ranks below one into branches; a branch's first rank is the child, the others are below it."""
    count = min(fan_out, len(ranks))
    return [ranks[len(ranks) * i // count : len(ranks) * (i + 1) // count] for i in range(count)]


def _place(rank: int, tops: list[Sequence[int]], fan_out: int) -> tuple[int, list[Sequence[int]]]:
    """Return a rank's parent and the branches below it."""
    parent, below = 0, tops
    while rank != parent:
        branch = next(branch for branch in below if rank in branch)
        below = branches(branch[1:], fan_out)
        if branch[0] == rank:
            break
        parent = branch[0]
    return parent, below


class ControlChannel:
    """One rank's end of the control group.

    `groups`: ranks that get verbs independently of other groups', so that one may be busy while another gets a verb;
    each is a tree of its own. Empty: all are one group. `protocol`: how the answers to a verb become one; to those that
    it does not name, a list of each rank's.
    """

    def __init__(
        self,
        world: World,
        timeout_seconds: float,
        fan_out: int = FAN_OUT,
        groups: Sequence[Sequence[int]] = (),
        link: Link | None = None,
        protocol: Mapping[str, Combined] | None = None,
    ):
        self.protocol = protocol or {}
        self.rank, self.started = world.rank, world.started
        self.timeout_seconds = timeout_seconds
        self.link: Link = link or GlooLink(world)
        self.bytes_moved = self.messages_moved = 0
        self._trees: list[Sequence[int]] = [[rank for rank in group if rank] for group in groups]
        self._trees = self._trees or [range(1, world.size)]
        tops = [branch for tree in self._trees for branch in branches(tree, fan_out)]
        self.parent, self._branches = _place(self.rank, tops, fan_out)
        self._below: _Below | None = None
        self._pending: list[Pending] = []

    # Rank 0

    def post(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> "Pending":
        """Rank 0: give ranks a verb; they begin as they get it.

        `ranks`: None are all. `by_rank`: more arguments, of each its own, in the order of `ranks`; a rank gets no
        other's. Verbs that were posted to the same group before are waited for.
        """
        place, order = current_status(), [0, *(rank for tree in self._trees for rank in tree)]
        named = range(len(order)) if ranks is None else ranks
        parts = dict(zip(named, by_rank, strict=True)) if by_rank is not None else {}
        if ranks is not None:
            wanted = frozenset(named)
            order = [rank for rank in order if rank in wanted]
        own = _decode(_encode({**arguments, **parts.get(0, {})})) if 0 in order else None
        order = [rank for rank in order if rank]
        message = Message(
            str(verb),
            place.step,
            str(place.phase),
            time.monotonic() - self.started + self.timeout_seconds,
            None if ranks is None else order,
            msgspec.Raw(_encode(arguments)),
            [msgspec.Raw(_encode(parts[rank])) for rank in order] if parts else [],
        )
        for pending in self._pending:
            if any(rank in branch for branch in pending.branches for rank in order):
                pending.collect()
        below = self._hand_down(message, 0)
        pending = Pending(self, below, own)
        self._pending.append(pending)
        return pending

    # The other ranks

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next verb that is for this rank, and say that it is here."""
        while True:
            message = self.take()
            self.confirm()
            if (arguments := self.arguments(message)) is not None:
                return message.verb, arguments
            self.pass_on()

    def take(self) -> Message:
        """Wait for the next verb, and hand it to the branches below."""
        with self._naming([self.parent], "before its next verb"), doing(f"{WAITS}the next verb"):
            message = _decode(self._received(self.parent), type=Message)
        set_status(step=message.step, phase=message.phase)
        self._below = self._hand_down(message, 1)
        return message

    def arguments(self, message: Message) -> dict[str, Any] | None:
        """Return this rank's arguments; None: the verb is only for ranks below it."""
        if message.ranks is not None and self.rank not in message.ranks:
            return None
        own = _decode(message.parts[0]) if message.parts else {}
        return {**_decode(message.arguments), **own}

    def confirm(self) -> None:
        """Wait until each rank below has the verb, and say so."""
        assert self._below is not None
        self._await_receipts(self._below)
        when = f"at verb '{self._below.verb}'"
        with self._naming([self.parent], when), doing(f"{WAITS}rank {self.parent} to hear that it is here"):
            self.link.give_receipt(self.parent)

    def answer(self, value: Any) -> None:
        """Give rank 0 this rank's answer with those of the ranks below."""
        assert self._below is not None
        self.pass_on([self.how(self._below.verb).encoded(value)])

    def pass_on(self, own: Sequence[msgspec.Raw] = ()) -> None:
        """Give rank 0 the answers of the ranks below."""
        assert self._below is not None
        answers = [*own, *self._collect(self._below)]
        one = answers[0] if len(answers) == 1 else _encode(self.combined(self._below.verb, answers))
        with self._naming([self.parent], f"before it took the answer to '{self._below.verb}'"):
            sent = self._send(bytes(one), self.parent)
            with doing(f"{WAITS}rank {self.parent} to take its answer"):  # which it does after its own part of the verb
                sent.wait()

    # Both

    def how(self, verb: str) -> Combined:
        """Return how the answers to a verb become one."""
        return self.protocol.get(verb, GATHERED)

    def combined(self, verb: str, answers: Sequence[msgspec.Raw]) -> Any:
        """Make one of answers, which are in the order of ranks."""
        how = self.how(verb)
        return reduce(how.combine, map(how.decoded, answers))

    def _hand_down(self, message: Message, start: int) -> "_Below":
        """Begin to give the branches a verb; `start`: how many of the message's ranks come before them."""
        below = _Below(message.verb, message.until)
        margin = min(1.0, self.timeout_seconds / 20)
        for branch in self._branches:
            part = message.for_branch(branch, start)
            start += len(branch)
            if part is None:
                continue
            # A parent hears of what its children miss before it gives up on them.
            part.until -= margin
            with self._naming([branch[0]], f"at verb '{message.verb}'"):
                below.receipts[branch[0]] = self.link.expect_receipt(branch[0])
                below.sends.append(self._send(_encode(part), branch[0]))
            below.branches.append(branch)
        return below

    def _await_receipts(self, below: "_Below") -> None:
        """Raise MissingRanks, with ranks and verb, when the children are not there in time."""
        # A rank that is late itself gives those below it a moment: they may have waited for it.
        deadline = max(self.started + below.until, time.monotonic() + min(0.5, self.timeout_seconds / 40))
        with doing(f"{WAITS}all ranks to be at {below.verb}"):
            missing = []
            for rank, receipt in below.receipts.items():
                with self._naming([rank], f"at verb '{below.verb}'"):
                    missing += [] if receipt.by(deadline) else [rank]
        if missing:
            self._give_up(
                missing,
                "{} did not arrive at verb '" + below.verb + f"' within {self.timeout_seconds:g} s "
                "(run.control_timeout_seconds): its last verb may still run there, or the process is stopped",
            )
        with doing(f"{WAITS}all ranks to have {below.verb}"):
            for rank, sent in zip(below.receipts, below.sends, strict=True):
                with self._naming([rank], f"at verb '{below.verb}'"):
                    sent.wait()
        below.receipts, below.sends = {}, []

    def _collect(self, below: "_Below") -> list[msgspec.Raw]:
        """Return the answer of each branch below, in the order of ranks."""
        answers = []
        for branch in below.branches:
            child = branch[0]
            of_others = f" and of {ranks_named(branch[1:])}, which come through it" if len(branch) > 1 else ""
            with self._naming([child], "before its answer"), doing(f"{WAITS}the answer of rank {child}{of_others}"):
                answers.append(msgspec.Raw(self._received(child)))
        return answers

    def _send(self, message: bytes, rank: int) -> Waits:
        self.bytes_moved += len(message)
        self.messages_moved += 1
        return self.link.send(message, rank)

    def _received(self, rank: int) -> bytes:
        message = self.link.receive(rank)
        self.bytes_moved += len(message)
        self.messages_moved += 1
        return message

    @contextmanager
    def _naming(self, ranks: list[int], when: str) -> Iterator[None]:
        """gloo knows a peer that is gone by its address only."""
        try:
            yield
        except RuntimeError as error:
            words = f"{{}} is gone {when}: its process or its node ended, see there ({error})"
            self._give_up(ranks, words, error)

    def _give_up(self, ranks: list[int], words: str, error: RuntimeError | None = None) -> NoReturn:
        """Raise MissingRanks, in the words of those that gave up themselves because of ranks below them."""
        relays = {self.parent, *(branch[0] for branch in self._branches if len(branch) > 1)} - {0}
        if self.rank:
            self.link.leave_reason("")
        reasons = self.link.reasons([rank for rank in ranks if rank in relays])
        silent = [rank for rank in ranks if rank not in reasons]
        told = list(dict.fromkeys(reasons.values()))
        if silent:
            told.append(words.replace("{}", ranks_named(silent)))
        if self.rank:
            self.link.leave_reason("; ".join(told))
        raise MissingRanks("; ".join(told)) from error


@dataclass
class _Below:
    """A verb that the branches below a rank have been given."""

    verb: str
    until: float
    branches: list[Sequence[int]] = field(default_factory=list)
    receipts: dict[int, Receipt] = field(default_factory=dict)
    sends: list[Waits] = field(default_factory=list)


class Pending:
    """A verb that was posted: rank 0 may do something else before it asks for the answers."""

    def __init__(self, channel: ControlChannel, below: _Below, own: dict[str, Any] | None):
        self.own_arguments: dict[str, Any] | None = own
        """Of rank 0, where it does the verb too."""
        self.branches = below.branches
        self._channel, self._below = channel, below
        self._answers: list[msgspec.Raw] | None = None

    def wait(self) -> None:
        """Wait until each rank has the verb. Raises MissingRanks when the control timeout passes."""
        self._channel._await_receipts(self._below)

    def collect(self) -> None:
        """Wait for the other ranks' answers, and keep them."""
        if self._answers is None:
            self.wait()
            self._answers = self._channel._collect(self._below)
            self._channel._pending.remove(self)

    def answer(self, own: Any = None) -> Any:
        """Return what the ranks answer, as one; `own`: what rank 0 does, where it is one of them."""
        self.collect()
        verb, answers = self._below.verb, self._answers or []
        if self.own_arguments is not None:
            answers = [self._channel.how(verb).encoded(own), *answers]
        return self._channel.combined(verb, answers)
