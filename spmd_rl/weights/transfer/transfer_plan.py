"""Who sends which part of a model to whom, so that every rank's destination shard is filled once: pure arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd_rl.weights.transfer.boxes import Box, Shard, contains
from spmd_rl.weights.transfer.bundles import Bundle, Part
from spmd_rl.weights.transfer.rounds import Schedule

__all__ = ["Copy", "Message", "Part", "Plan", "Planner", "Round", "plan"]

BUCKET_ELEMENTS = 1 << 24


class Copy(NamedTuple):
    """A part that this rank already holds in its source shard."""

    source: Part
    destination: Part


@dataclass(frozen=True, slots=True)
class Message:
    """The parts that go to or come from one peer, in the order that both sides know."""

    peer: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """What happens at once: at most a bucket's worth of elements reach a rank in one round, and leave it.

    `complete`: destination parameters that have all their parts after this round.
    """

    local: tuple[Copy, ...]
    send: tuple[Message, ...]
    receive: tuple[Message, ...]
    complete: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One rank's part in a move; all ranks' plans have the same number of rounds."""

    rank: int
    world: int
    rounds: tuple[Round, ...]
    destination: Shard = field(repr=False)

    @property
    def local_elements(self) -> int:
        """Elements copied on this rank."""
        return sum(copy.source.box.elements for round in self.rounds for copy in round.local)

    @property
    def sent_elements(self) -> int:
        """Elements sent to other ranks."""
        return _elements(message for round in self.rounds for message in round.send)

    @property
    def received_elements(self) -> int:
        """Elements received from other ranks."""
        return _elements(message for round in self.rounds for message in round.receive)


class Planner:
    """A move of the sources (one shard a rank) into the destinations: what all ranks know, and the plan of each.

    Every rank computes the same schedule, so nothing needs to be agreed; see Schedule for who sends. A bucket is what a
    rank receives, and what it sends, in one round at most: messages are about that large together, on either side.
    Raises ValueError when no source holds a part.
    """

    def __init__(
        self,
        sources: Sequence[Shard],
        destinations: Sequence[Shard],
        ranks_per_node: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.sources, self.destinations = sources, destinations
        self.schedule = Schedule(sources, destinations, ranks_per_node, bucket_elements)

    def plan(self, rank: int) -> Plan:
        """The part of one rank."""
        held = _Held(self.sources[rank])
        local: dict[int, list[Copy]] = {}
        receive: dict[int, dict[int, list[Part]]] = {}
        send: dict[int, dict[int, list[Part]]] = {}
        last = dict.fromkeys(self.destinations[rank].params, 0)  # a parameter without any piece is complete at once
        for taker, supplier, round, bundle in self.schedule.incoming[rank]:
            last[bundle.param] = max(last[bundle.param], round)
            if supplier == taker:
                pairs = zip(held.parts(bundle), bundle.parts, strict=True)
                local.setdefault(round, []).extend(Copy(source, destination) for source, destination in pairs)
            else:
                receive.setdefault(round, {}).setdefault(supplier, []).extend(bundle.parts)
        for taker, _, round, bundle in self.schedule.outgoing[rank]:
            send.setdefault(round, {}).setdefault(taker, []).extend(held.parts(bundle))
        complete: dict[int, list[str]] = {}
        for name, n in last.items():
            complete.setdefault(n, []).append(name)
        rounds = tuple(
            Round(
                tuple(local.get(n, ())),
                _messages(send.get(n, {})),
                _messages(receive.get(n, {})),
                tuple(complete.get(n, ())),
            )
            for n in range(self.schedule.rounds)
        )
        return Plan(rank, self.schedule.world, rounds, self.destinations[rank])


def plan(
    sources: Sequence[Shard],
    destinations: Sequence[Shard],
    rank: int,
    ranks_per_node: int = 0,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Plan:
    """The part of `rank` in moving the sources (one shard a rank) into the destinations; see Planner."""
    return Planner(sources, destinations, ranks_per_node, bucket_elements).plan(rank)


def bucket_of_bytes(bucket_bytes: int, element_bytes: int) -> int:
    """Elements of a bucket of so many bytes: at least one."""
    return max(1, bucket_bytes // element_bytes)


class _Held:
    """Where the parts of a bundle lie in a source shard."""

    def __init__(self, shard: Shard) -> None:
        self._pieces = shard.by_tensor
        self._parts: dict[Bundle, tuple[Part, ...]] = {}

    def parts(self, bundle: Bundle) -> tuple[Part, ...]:
        """The same boxes, in the source's parameters; several ranks may ask for them."""
        if bundle not in self._parts:
            self._parts[bundle] = tuple(self._part(part.box) for part in bundle.parts)
        return self._parts[bundle]

    def _part(self, box: Box) -> Part:
        piece = next(piece for piece in self._pieces[box.tensor] if contains(piece, box))
        return Part(box, piece.param, piece.place(box))


def _messages(parts: dict[int, list[Part]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(parts[peer])) for peer in sorted(parts))


def _elements(messages: Iterable[Message]) -> int:
    return sum(part.box.elements for message in messages for part in message.parts)
