"""Schedule a transfer: who sends what to whom in which round, which all ranks compute alike, and the plan of each."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from spmd_rl.weights.transfer.boxes import Piece, Shard
from spmd_rl.weights.transfer.suppliers import Bundle, supplies

BUCKET_ELEMENTS = 1 << 24
# A rank looks so far ahead for bundles whose suppliers have room, and has parameters of so many buckets unfinished
# (but at least one parameter): links stay busy, and who collects a parameter before using it holds little.
LOOK_AHEAD_BUNDLES = 24
OPEN_BUCKETS = 4
OPEN_PARAMETERS = 2


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part of what happens at once: at most a bucket's worth of elements reach it, and leave it."""

    local: tuple[tuple[Piece, Piece], ...]
    """Pieces that it holds already: of its source shard, and the same of its destination."""
    send: Mapping[int, tuple[Piece, ...]]
    """Peer -> pieces of the source, in the order that both sides know."""
    receive: Mapping[int, tuple[Piece, ...]]
    """Peer -> pieces of the destination, in that order."""
    complete: tuple[str, ...]
    """Destination parameters that have all their pieces after this round."""


@dataclass(frozen=True)
class Plan:
    """One rank's part in a transfer; all ranks' plans have the same number of rounds."""

    rank: int
    world: int
    rounds: tuple[Round, ...]
    destination: Shard = field(repr=False)


class Schedule:
    """A transfer of the sources (one shard a rank) into the destinations, each element from where `supplies` says.

    Every rank computes the same, so nothing needs to be agreed. In no round does a rank receive, or send, more than a
    bucket's worth of elements: messages are about that large together, on either side. `ranks_per_node` 0: all ranks
    are on one node. Raises ValueError when no source holds a part of a destination.
    """

    def __init__(
        self,
        sources: Sequence[Shard],
        destinations: Sequence[Shard],
        ranks_per_node: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        assert len(destinations) == len(sources), f"{len(sources)} sources, {len(destinations)} destinations"
        assert bucket_elements >= 1, bucket_elements
        self.sources, self.destinations = sources, destinations
        self.world = len(sources)
        self.bucket_elements = bucket_elements
        self.ranks_per_node = ranks_per_node or self.world
        self.incoming: list[list[tuple[int, int, int, Bundle]]] = [[] for _ in sources]
        """By rank: round, taker, supplier and bundle of all that it takes, its own copies included."""
        self.outgoing: list[list[tuple[int, int, int, Bundle]]] = [[] for _ in sources]
        """By rank: the same of all that it sends to others; what goes to one of them is in the same order in both."""
        with _no_garbage_collection():
            wanted = supplies(sources, destinations, self.ranks_per_node, bucket_elements)
            queues = [_Queue(rank, params) for rank, params in enumerate(wanted)]
            self.rounds = max(self._place(queues), int(any(shard.params for shard in destinations)))

    def plan(self, rank: int) -> Plan:
        """Return the part of one rank."""
        held = _Held(self.sources[rank])
        local: dict[int, list[tuple[Piece, Piece]]] = {}  # by round
        receive: dict[int, dict[int, list[Piece]]] = {}  # by round and peer
        send: dict[int, dict[int, list[Piece]]] = {}
        last = dict.fromkeys(self.destinations[rank].params, 0)  # a parameter without any piece is complete at once
        for round, _, supplier, bundle in self.incoming[rank]:
            last[bundle.param] = max(last[bundle.param], round)
            if supplier == rank:
                local.setdefault(round, []).extend(zip(held.pieces(bundle), bundle.pieces, strict=True))
            else:
                receive.setdefault(round, {}).setdefault(supplier, []).extend(bundle.pieces)
        for round, taker, _, bundle in self.outgoing[rank]:
            send.setdefault(round, {}).setdefault(taker, []).extend(held.pieces(bundle))
        complete: dict[int, list[str]] = {}
        for name, n in last.items():
            complete.setdefault(n, []).append(name)
        rounds = (
            Round(
                tuple(local.get(n, ())),
                _by_peer(send.get(n, {})),
                _by_peer(receive.get(n, {})),
                tuple(complete.get(n, ())),
            )
            for n in range(self.rounds)
        )
        return Plan(rank, self.world, tuple(rounds), self.destinations[rank])

    def _place(self, queues: list["_Queue"]) -> int:
        """Round by round, let each rank take what has room on both sides; the number of rounds."""
        rounds = 0
        for queue in queues:
            for round, bundle in queue.copies(self.bucket_elements):
                self.incoming[queue.taker].append((round, queue.taker, queue.taker, bundle))
                rounds = max(rounds, round + 1)
        waiting, round = [queue for queue in queues if queue.lacking], 0
        while waiting:
            room = [self.bucket_elements] * self.world
            # Who still needs most chooses first.
            waiting.sort(key=lambda queue: -queue.lacking)
            for queue in waiting:
                for supplier, bundle in queue.take(room, self.bucket_elements):
                    sent = (round, queue.taker, supplier, bundle)
                    self.incoming[queue.taker].append(sent)
                    if supplier != queue.taker:
                        self.outgoing[supplier].append(sent)
            waiting = [queue for queue in waiting if queue.lacking]
            round += 1
        return max(rounds, round)


def bucket_of_bytes(bucket_bytes: int, element_bytes: int) -> int:
    """Return the elements of a bucket of so many bytes: at least one."""
    return max(1, bucket_bytes // element_bytes)


def _by_peer(pieces: Mapping[int, list[Piece]]) -> dict[int, tuple[Piece, ...]]:
    return {peer: tuple(pieces[peer]) for peer in sorted(pieces)}


class _Held:
    """The pieces of bundles, as they lie in a source shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._pieces: dict[Bundle, tuple[Piece, ...]] = {}

    def pieces(self, bundle: Bundle) -> tuple[Piece, ...]:
        """Return the same boxes, in the source's parameters; several ranks may ask for them."""
        if bundle not in self._pieces:
            self._pieces[bundle] = tuple(self._shard.locate(piece) for piece in bundle.pieces)
        return self._pieces[bundle]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects without cycles: looking for cycles among them would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Param:
    """A parameter that a rank lacks parts of: those that it waits for, from whom, and those that it has."""

    __slots__ = ("away", "elements", "here")

    def __init__(self, pairs: list[tuple[int, Bundle]], taker: int) -> None:
        self.away = [pair for pair in pairs if pair[0] != taker]
        self.here = [pair for pair in pairs if pair[0] == taker]
        self.elements = sum(bundle.elements for _, bundle in pairs)


class _Queue:
    """The bundles that one rank still needs, in the order in which it prefers to take them."""

    def __init__(self, taker: int, params: list[list[tuple[int, Bundle]]]) -> None:
        self.taker = taker
        self.lacking = 0
        """Elements that have to come from other ranks."""
        self._complete: list[Bundle] = []  # of parameters that are on the rank already
        self._begun: list[_Param] = []
        self._next: list[_Param] = []
        self._open = 0  # elements of the parameters that are begun
        for pairs in params:
            param = _Param(pairs, taker)
            if param.away:
                self._next.append(param)
                self.lacking += sum(bundle.elements for _, bundle in param.away)
            else:
                self._complete.extend(bundle for _, bundle in param.here)

    def copies(self, bucket: int) -> Iterator[tuple[int, Bundle]]:
        """Choose rounds for the parameters that are on the rank already: about a bucket's worth in each."""
        round, filled = 0, 0
        for bundle in self._complete:
            if filled and filled + bundle.elements > bucket:
                round, filled = round + 1, 0
            yield round, bundle
            filled += bundle.elements

    def take(self, room: list[int], bucket: int) -> list[tuple[int, Bundle]]:
        """Take what one round has room for, and say from whom; `room`: elements that each rank can still send in it."""
        taken: list[tuple[int, Bundle]] = []
        left, misses = bucket, 0
        for param in (*self._begun, *self._next[:LOOK_AHEAD_BUNDLES]):
            begun = param in self._begun
            full = self._open + param.elements > OPEN_BUCKETS * bucket
            if not begun and full and len(self._begun) >= OPEN_PARAMETERS:
                break
            waiting = []
            for pair in param.away:
                supplier, bundle = pair
                if bundle.elements > left or bundle.elements > room[supplier]:
                    waiting.append(pair)
                    continue
                taken.append(pair)
                left -= bundle.elements
                room[supplier] -= bundle.elements
            misses += len(waiting)
            if not begun and len(waiting) < len(param.away):
                self._next.remove(param)
                self._begun.append(param)
                self._open += param.elements
            param.away = waiting
            if not waiting:
                taken.extend(param.here)
                self._begun.remove(param)
                self._open -= param.elements
            if left < bucket // 16 or misses >= LOOK_AHEAD_BUNDLES:
                break
        self.lacking -= bucket - left
        return taken
