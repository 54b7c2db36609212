"""Which rank sends what to whom in which round: the part of a move that all ranks compute alike."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from spmd_rl.weights.transfer.boxes import Shard
from spmd_rl.weights.transfer.bundles import Bundle, Holders, Ranks, bundles, distinct

# A rank looks so far ahead for bundles whose suppliers have room, and has parameters of so many buckets unfinished
# (but at least one parameter): links stay busy, and who collects a parameter before using it holds little.
LOOK_AHEAD_BUNDLES = 24
OPEN_BUCKETS = 4
OPEN_PARAMETERS = 2
# A rank stays with those that it takes from already while they send at most this part of the mean more than others:
# every further pair of ranks that talk costs a connection and its buffers.
SLACK = 1 / 32


class Transfer(NamedTuple):
    """A bundle on its way; the supplier may be the taker itself."""

    taker: int
    supplier: int
    round: int
    bundle: Bundle


class Schedule:
    """All transfers of a move.

    An element comes from the same rank if that holds it, else from a holder on the same node, else from any holder;
    among those, from the one that has least to send, itself and its node. In no round does a rank receive, or send,
    more than a bucket's worth of elements. `ranks_per_node` 0: all ranks are on one node. Raises ValueError when no
    source holds a part of a destination.
    """

    def __init__(
        self, sources: Sequence[Shard], destinations: Sequence[Shard], ranks_per_node: int, bucket_elements: int
    ) -> None:
        assert len(destinations) == len(sources), f"{len(sources)} sources, {len(destinations)} destinations"
        assert bucket_elements >= 1, bucket_elements
        self.world = len(sources)
        self.bucket_elements = bucket_elements
        self.ranks_per_node = ranks_per_node or self.world
        self.incoming: list[list[Transfer]] = [[] for _ in sources]
        """What each rank takes, its own copies included."""
        self.outgoing: list[list[Transfer]] = [[] for _ in sources]
        """What each rank sends to others; what goes from one rank to another is in the same order in both."""
        with _no_garbage_collection():
            queues = self._queues(sources, destinations)
            self.rounds = max(self._place(queues), int(any(shard.params for shard in destinations)))

    def _queues(self, sources: Sequence[Shard], destinations: Sequence[Shard]) -> list["_Queue"]:
        shards, members = distinct(destinations)
        holders = Holders(sources)
        classes = [bundles(shard, holders, self.bucket_elements) for shard in shards]
        queues = [_Queue(rank) for rank in range(self.world)]
        for params, ranks, suppliers in zip(classes, members, self._suppliers(classes, members), strict=True):
            for j, (taker, chosen) in enumerate(zip(ranks, suppliers, strict=True)):
                # Ranks that need the same begin in different places, so that they ask different ranks.
                queues[taker].begin(params, chosen, j * len(params) // len(ranks))
        return queues

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    def _suppliers(self, classes: list[list[list[Bundle]]], members: list[Ranks]) -> list[list[list[int]]]:
        """For each class of equal destinations and each of its ranks: who supplies each bundle."""
        per_node = self.ranks_per_node
        # What a rank sends to others, and on top of it what leaves its node, shared out over the node's ranks.
        score = [0] * self.world
        chosen: list[list[list[int]]] = [[[] for _ in ranks] for ranks in members]
        undecided: list[tuple[Ranks, int, int, list[int], int]] = []
        choices: dict[tuple[Ranks, int], Ranks] = {}
        partners: list[set[int]] = [set() for _ in range(self.world)]

        def send(supplier: int, taker: int, elements: int) -> None:
            score[supplier] += elements * per_node
            first = supplier - supplier % per_node
            if not first <= taker < first + per_node:
                for rank in range(first, min(first + per_node, self.world)):
                    score[rank] += elements

        for params, ranks, lists in zip(classes, members, chosen, strict=True):
            for bundle in (bundle for param in params for bundle in param):
                for taker, suppliers in zip(ranks, lists, strict=True):
                    found = choices.get((bundle.holders, taker))
                    if found is None:
                        found = choices[bundle.holders, taker] = self._choices(bundle.holders, taker)
                    if len(found) > 1:
                        undecided.append((found, taker, bundle.elements, suppliers, len(suppliers)))
                    elif found[0] != taker:
                        partners[taker].add(found[0])
                        send(found[0], taker, bundle.elements)
                    suppliers.append(found[0])
        total = sum(score) + sum(elements * per_node for _, _, elements, _, _ in undecided)
        slack = int(SLACK * total / self.world)
        # Where there is no choice came first, so that the others can make up for it.
        undecided.sort(key=lambda entry: len(entry[0]))
        for found, taker, elements, suppliers, n in undecided:
            known = [rank for rank in found if rank in partners[taker]]
            best = min(found, key=score.__getitem__)
            if known and best not in partners[taker]:
                other = min(known, key=score.__getitem__)
                best = other if score[other] <= score[best] + slack else best
            partners[taker].add(best)
            suppliers[n] = best
            send(best, taker, elements)
        return chosen

    def _choices(self, holders: Ranks, taker: int) -> Ranks:
        """Those of the holders that a rank would take from, beginning with the next one after it."""
        if taker in holders:
            return (taker,)
        near = [rank for rank in holders if self.node(rank) == self.node(taker)]
        return tuple(sorted(near or holders, key=lambda rank: (rank - taker) % self.world))

    def _place(self, queues: list["_Queue"]) -> int:
        """Round by round, let each rank take what has room on both sides; the number of rounds."""
        rounds = 0
        for queue in queues:
            for round, bundle in queue.copies(self.bucket_elements):
                self.incoming[queue.taker].append(Transfer(queue.taker, queue.taker, round, bundle))
                rounds = max(rounds, round + 1)
        waiting, round = [queue for queue in queues if queue.lacking], 0
        while waiting:
            room = [self.bucket_elements] * self.world
            # Who still needs most chooses first.
            waiting.sort(key=lambda queue: -queue.lacking)
            for queue in waiting:
                for supplier, bundle in queue.take(room, self.bucket_elements):
                    transfer = Transfer(queue.taker, supplier, round, bundle)
                    self.incoming[queue.taker].append(transfer)
                    if supplier != queue.taker:
                        self.outgoing[supplier].append(transfer)
            waiting = [queue for queue in waiting if queue.lacking]
            round += 1
        return max(rounds, round)


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
    """What one rank still needs, in the order in which it prefers to take it."""

    def __init__(self, taker: int) -> None:
        self.taker = taker
        self.lacking = 0
        """Elements that have to come from other ranks."""
        self._complete: list[Bundle] = []  # of parameters that are on the rank already
        self._begun: list[_Param] = []
        self._next: list[_Param] = []
        self._open = 0  # elements of the parameters that are begun

    def begin(self, params: list[list[Bundle]], suppliers: list[int], first: int) -> None:
        """The parameters that the rank needs, beginning with the `first` one."""
        found, n = [], 0
        for param in params:
            found.append(_Param(list(zip(suppliers[n : n + len(param)], param, strict=True)), self.taker))
            n += len(param)
        for param in found[first:] + found[:first]:
            if param.away:
                self._next.append(param)
                self.lacking += sum(bundle.elements for _, bundle in param.away)
            else:
                self._complete.extend(bundle for _, bundle in param.here)

    def copies(self, bucket: int) -> Iterator[tuple[int, Bundle]]:
        """Rounds for the parameters that are on the rank already: about a bucket's worth in each."""
        round, filled = 0, 0
        for bundle in self._complete:
            if filled and filled + bundle.elements > bucket:
                round, filled = round + 1, 0
            yield round, bundle
            filled += bundle.elements

    def take(self, room: list[int], bucket: int) -> list[tuple[int, Bundle]]:
        """What the rank takes in one round, and from whom; `room`: elements that each rank can still send in it."""
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
