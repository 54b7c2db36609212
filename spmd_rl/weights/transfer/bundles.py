"""What destinations are made of, in bundles of boxes that the same ranks hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmd_rl.weights.transfer.boxes import Box, Index, Piece, Shard, intersect, refine, split

Ranks = tuple[int, ...]


class Part(NamedTuple):
    """A box of a Hugging Face tensor, at `at` in a parameter of this rank."""

    box: Box
    param: str
    at: Index


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Parts of one destination parameter that all come from one rank, at most a bucket's worth; `holders` can send."""

    param: str
    holders: Ranks
    parts: tuple[Part, ...]
    elements: int


def distinct(shards: Sequence[Shard]) -> tuple[list[Shard], list[Ranks]]:
    """The distinct shard objects, and the ranks that have each."""
    ranks: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        ranks.setdefault(id(shard), []).append(rank)
    members = [tuple(group) for group in ranks.values()]
    return [shards[group[0]] for group in members], members


class Holders:
    """Who holds a box, whichever way the sources are cut; equal sets of ranks are one object."""

    def __init__(self, sources: Sequence[Shard]) -> None:
        shards, self._ranks = distinct(sources)
        self._classes: dict[str, dict[Box, list[int]]] = {}
        for i, shard in enumerate(shards):
            for piece in shard.pieces:
                self._classes.setdefault(piece.tensor, {}).setdefault(piece.box, []).append(i)
        self._sets: dict[frozenset[int], Ranks] = {}
        self._cells: dict[Box, list[tuple[Box, Ranks]]] = {}

    def cells(self, piece: Piece) -> list[tuple[Box, Ranks]]:
        """The piece cut so that each source holds a cell completely or not at all, with the ranks that do.

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


def bundles(shard: Shard, holders: Holders, bucket_elements: int) -> list[list[Bundle]]:
    """The bundles of each parameter of a destination shard that has any.

    Parameters with different holders alternate: the n-th one of each set of ranks comes before the (n+1)-th of any, so
    that all ranks are asked for something at any time.
    """
    params = []
    for param, pieces in shard.by_param.items():
        by_holders: dict[Ranks, list[Part]] = {}
        for piece in pieces:
            for cell, ranks in holders.cells(piece):
                for box in split(cell, bucket_elements):
                    by_holders.setdefault(ranks, []).append(Part(box, param, piece.place(box)))
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


def _pack(param: str, ranks: Ranks, parts: list[Part], bucket_elements: int) -> list[Bundle]:
    packed, some, filled = [], [], 0
    for part in parts:
        elements = part.box.elements
        if some and filled + elements > bucket_elements:
            packed.append(Bundle(param, ranks, tuple(some), filled))
            some, filled = [], 0
        some.append(part)
        filled += elements
    return [*packed, Bundle(param, ranks, tuple(some), filled)]
