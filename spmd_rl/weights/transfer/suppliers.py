"""Cut what destinations are made of into bundles that the same ranks hold, and choose who supplies each to whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.weights.transfer.boxes import Box, Piece, Shard, intersect, refine, split

Ranks = tuple[int, ...]

# A rank stays with those that it takes from already while they send at most this part of the mean more than others:
# every further pair of ranks that talk costs a connection and its buffers.
SLACK = 1 / 32


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Pieces of one destination parameter that all come from one rank, at most a bucket's worth; `holders` can send."""

    param: str
    holders: Ranks
    pieces: tuple[Piece, ...]
    elements: int


def supplies(
    sources: Sequence[Shard], destinations: Sequence[Shard], ranks_per_node: int, bucket_elements: int
) -> list[list[list[tuple[int, Bundle]]]]:
    """Return for each rank the parameters that it needs, in its order: each as bundles with the rank that supplies it.

    An element comes from the same rank if that holds it, else from a holder on the same node, else from any holder;
    among those, from the one that has least to send, itself and its node. Raises ValueError when no source holds a part
    of a destination.
    """
    shards, members = _distinct(destinations)
    holders = _Holders(sources)
    classes = [_bundles(shard, holders, bucket_elements) for shard in shards]
    found: list[list[list[tuple[int, Bundle]]]] = [[] for _ in sources]
    for params, ranks, chosen in zip(classes, members, _choose(classes, members, ranks_per_node), strict=True):
        for j, (taker, suppliers) in enumerate(zip(ranks, chosen, strict=True)):
            supplier = iter(suppliers)
            pairs = [[(next(supplier), bundle) for bundle in param] for param in params]
            # Ranks that need the same begin in different places, so that they ask different ranks.
            first = j * len(params) // len(ranks)
            found[taker] = pairs[first:] + pairs[:first]
    return found


def _distinct(shards: Sequence[Shard]) -> tuple[list[Shard], list[Ranks]]:
    """The distinct shard objects, and the ranks that have each."""
    ranks: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        ranks.setdefault(id(shard), []).append(rank)
    members = [tuple(group) for group in ranks.values()]
    return [shards[group[0]] for group in members], members


class _Holders:
    """The ranks that hold a box, whichever way the sources are cut; equal sets of ranks are one object."""

    def __init__(self, sources: Sequence[Shard]) -> None:
        shards, self._ranks = _distinct(sources)
        self._classes: dict[str, dict[Box, list[int]]] = {}
        for i, shard in enumerate(shards):
            for piece in shard.pieces:
                self._classes.setdefault(piece.tensor, {}).setdefault(piece.box, []).append(i)
        self._sets: dict[frozenset[int], Ranks] = {}
        self._cells: dict[Box, list[tuple[Box, Ranks]]] = {}

    def cells(self, piece: Piece) -> list[tuple[Box, Ranks]]:
        """Cut a piece so that each source holds a cell completely or not at all; with each cell the ranks that do.

        Raises ValueError when nobody holds a part.
        """
        if (box := piece.box) not in self._cells:
            self._cells[box] = self._cut(box)
        cells = self._cells[box]
        if sum(cell.elements for cell, _ in cells) < piece.elements:
            raise ValueError(f"no rank holds all of {box}, which {piece.param} is made of")
        return cells

    def _cut(self, wanted: Box) -> list[tuple[Box, Ranks]]:
        held = self._classes.get(wanted.tensor, {})
        if len(held) == 1 and wanted in held:
            return [(wanted, self._set(held[wanted]))]
        overlaps: dict[Box, list[int]] = {}
        for box, classes in held.items():
            common = intersect(box, wanted)
            if common is not None:
                overlaps.setdefault(common, []).extend(classes)
        cells = refine(list(overlaps))
        if len(cells) == len(overlaps):
            return [(cell, self._set(overlaps[cell])) for cell in cells]
        return [
            (cell, self._set([i for box, some in overlaps.items() if intersect(box, cell) for i in some]))
            for cell in cells
        ]

    def _set(self, classes: list[int]) -> Ranks:
        key = frozenset(classes)
        if key not in self._sets:
            self._sets[key] = tuple(sorted(rank for i in key for rank in self._ranks[i]))
        return self._sets[key]


def _bundles(shard: Shard, holders: _Holders, bucket_elements: int) -> list[list[Bundle]]:
    """The bundles of each parameter of a destination shard that has any.

    Parameters with different holders alternate: the n-th one of each set of ranks comes before the (n+1)-th of any, so
    that all ranks are asked for something at any time.
    """
    params = []
    for param, pieces in shard.by_param.items():
        by_holders: dict[Ranks, list[Piece]] = {}
        for piece in pieces:
            for cell, ranks in holders.cells(piece):
                by_holders.setdefault(ranks, []).extend(piece.part(box) for box in split(cell, bucket_elements))
        found = [
            bundle for ranks, parts in by_holders.items() for bundle in _pack(param, ranks, parts, bucket_elements)
        ]
        if found:
            params.append(found)
    seen: dict[frozenset[Ranks], int] = {}
    turns = []
    for found in params:
        who = frozenset(bundle.holders for bundle in found)
        seen[who] = turn = seen.get(who, -1) + 1
        turns.append(turn)
    return [params[n] for n in sorted(range(len(params)), key=turns.__getitem__)]


def _pack(param: str, ranks: Ranks, pieces: list[Piece], bucket_elements: int) -> list[Bundle]:
    packed: list[Bundle] = []
    some: list[Piece] = []
    filled = 0
    for piece in pieces:
        elements = piece.elements
        if some and filled + elements > bucket_elements:
            packed.append(Bundle(param, ranks, tuple(some), filled))
            some, filled = [], 0
        some.append(piece)
        filled += elements
    return [*packed, Bundle(param, ranks, tuple(some), filled)]


def _choose(classes: list[list[list[Bundle]]], members: list[Ranks], per_node: int) -> list[list[list[int]]]:
    """For each class of equal destinations and each of its ranks: who supplies each bundle.

    `classes` [class][parameter][bundle], `members` [class][rank]; returns [class][rank][bundle of all parameters].
    """
    world = sum(map(len, members))
    score = [0] * world  # [rank] what it sends, and on top what leaves its node, shared out over the node's ranks
    partners: list[set[int]] = [set() for _ in range(world)]  # [taker] whom it takes from already
    chosen: list[list[list[int]]] = [[[] for _ in ranks] for ranks in members]  # [class][rank][bundle]
    undecided: list[tuple[Ranks, int, int, list[int], int]] = []  # choices, taker, elements, its list, place there
    choices: dict[tuple[Ranks, int], Ranks] = {}  # (holders, taker) -> whom it would take from

    def send(supplier: int, taker: int, elements: int) -> None:
        score[supplier] += elements * per_node
        first = supplier - supplier % per_node
        if not first <= taker < first + per_node:
            for rank in range(first, min(first + per_node, world)):
                score[rank] += elements

    for params, ranks, lists in zip(classes, members, chosen, strict=True):
        for bundle in (bundle for param in params for bundle in param):
            for taker, suppliers in zip(ranks, lists, strict=True):
                found = choices.get((bundle.holders, taker))
                if found is None:
                    found = choices[bundle.holders, taker] = _nearest(bundle.holders, taker, world, per_node)
                if len(found) > 1:
                    undecided.append((found, taker, bundle.elements, suppliers, len(suppliers)))
                elif found[0] != taker:
                    partners[taker].add(found[0])
                    send(found[0], taker, bundle.elements)
                suppliers.append(found[0])
    total = sum(score) + sum(elements * per_node for _, _, elements, _, _ in undecided)
    slack = int(SLACK * total / world)
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


def _nearest(holders: Ranks, taker: int, world: int, per_node: int) -> Ranks:
    """Those of the holders that a rank would take from, beginning with the next one after it."""
    if taker in holders:
        return (taker,)
    near = [rank for rank in holders if rank // per_node == taker // per_node]
    return tuple(sorted(near or holders, key=lambda rank: (rank - taker) % world))
