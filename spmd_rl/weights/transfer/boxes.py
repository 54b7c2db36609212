"""Cut Hugging Face tensors into boxes, and place them in shards: the algebra that every use of the weights shares."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Index = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a Hugging Face tensor: from `start`, `shape` elements long in each dimension."""

    tensor: str
    start: Index
    shape: Index

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{a + n}' for a, n in zip(self.start, self.shape, strict=True))}]"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Piece(NamedTuple):
    """A box of a Hugging Face tensor and its place in a parameter of a shard.

    `at` is the first index in the parameter. It may have more dimensions than the box (a stack of experts): the box has
    extent 1 in those leading ones.
    """

    tensor: str
    start: Index
    shape: Index
    param: str
    at: Index

    @property
    def box(self) -> Box:
        """The part of the Hugging Face tensor."""
        return Box(self.tensor, self.start, self.shape)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> Index:
        """Size in the parameter's dimensions."""
        return (1,) * (len(self.at) - len(self.shape)) + self.shape

    def place(self, box: "Piece | Box") -> Index:
        """Return the first index in the parameter of a box that lies inside this piece."""
        lead = len(self.at) - len(self.shape)
        inner = zip(self.at[lead:], box.start, self.start, strict=True)
        return self.at[:lead] + tuple(a + b - s for a, b, s in inner)

    def part(self, box: "Piece | Box") -> "Piece":
        """Return the piece of a box that lies inside this piece."""
        return Piece(box.tensor, box.start, box.shape, self.param, self.place(box))


@dataclass(frozen=True, eq=False)
class Shard:
    """The parameters that one rank holds: name -> shape, and the pieces in them.

    Elements that no piece covers are padding and hold zeros. Ranks that hold the same may share one Shard object:
    plans then look at it once.
    """

    params: dict[str, Index]
    pieces: tuple[Piece, ...]

    @cached_property
    def by_param(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces of each parameter."""
        found: dict[str, list[Piece]] = {name: [] for name in self.params}
        for piece in self.pieces:
            found[piece.param].append(piece)
        return {name: tuple(pieces) for name, pieces in found.items()}

    @cached_property
    def by_tensor(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces of each Hugging Face tensor."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.tensor, []).append(piece)
        return {name: tuple(pieces) for name, pieces in found.items()}

    def locate(self, box: Piece | Box) -> Piece:
        """Return the piece of a box that this shard holds."""
        return next(piece for piece in self.by_tensor[box.tensor] if contains(piece, box)).part(box)

    @property
    def elements(self) -> int:
        """Number of elements, padding included."""
        return sum(math.prod(shape) for shape in self.params.values())

    def without(self, params: Collection[str]) -> "Shard":
        """Return the shard without some of its parameters; the same object where none of them is in it."""
        if not any(name in self.params for name in params):
            return self
        left = {name: shape for name, shape in self.params.items() if name not in params}
        return Shard(left, tuple(piece for piece in self.pieces if piece.param in left))

    def padded(self, param: str) -> bool:
        """Tell a parameter that has elements from no Hugging Face tensor."""
        return sum(piece.elements for piece in self.by_param[param]) < math.prod(self.params[param])


NOTHING = Shard({}, ())


def intersect(a: Piece | Box, b: Piece | Box) -> Box | None:
    """The box that both cover, or None."""
    if a.tensor != b.tensor:
        return None
    start, shape = [], []
    for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return Box(a.tensor, tuple(start), tuple(shape))


def view(tensor: "torch.Tensor", at: Index, shape: Index) -> "torch.Tensor":
    """Return the part of a parameter from `at` on, without the leading dimensions that `at` has more than `shape`."""
    lead = len(at) - len(shape)
    inner = tensor[at[:lead]] if lead else tensor
    return inner[tuple(slice(a, a + n) for a, n in zip(at[lead:], shape, strict=True))]


def whole(tensor: str, shape: Index, param: str, at: Index | None = None) -> Piece:
    """A complete Hugging Face tensor as one piece of a parameter."""
    return Piece(tensor, (0,) * len(shape), shape, param, at if at is not None else (0,) * len(shape))


def stack(param: str, boxes: Iterable[Box]) -> tuple[Index, list[Piece]]:
    """Shape and pieces of the parameter that has the boxes one below the other."""
    pieces: list[Piece] = []
    rows, rest = 0, Index()
    for box in boxes:
        rest = box.shape[1:]
        pieces.append(Piece(*box, param, (rows,) + (0,) * len(rest)))
        rows += box.shape[0]
    return (rows, *rest), pieces


def cut(pieces: Iterable[Piece], dim: int, low: int, high: int) -> list[Piece]:
    """The pieces of parameter[low:high] along `dim`, with indices that count from `low`."""
    kept = []
    for piece in pieces:
        first, last = max(piece.at[dim], low), min(piece.at[dim] + piece.extent[dim], high)
        if first >= last:
            continue
        at = _with(piece.at, dim, first - low)
        inner = dim - (len(piece.at) - len(piece.shape))
        if inner < 0:  # a leading dimension: the box is not cut, only moved
            kept.append(Piece(*piece.box, piece.param, at))
            continue
        start = _with(piece.start, inner, piece.start[inner] + first - piece.at[dim])
        kept.append(Piece(piece.tensor, start, _with(piece.shape, inner, last - first), piece.param, at))
    return kept


def cut_rows(pieces: Iterable[Piece], low: int, high: int) -> list[Piece]:
    """The pieces of rows low to high (without high)."""
    return cut(pieces, 0, low, high)


def cut_columns(pieces: Iterable[Piece], low: int, high: int) -> list[Piece]:
    """The pieces of columns low to high (without high)."""
    return cut(pieces, 1, low, high)


def split(box: Box, elements: int) -> list[Box]:
    """The box as boxes of at most so many elements (at least one each), in row-major order."""
    if box.elements <= elements:
        return [box]
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, elements // math.prod(box.shape[dim + 1 :]))
    parts = []
    for low in range(0, box.shape[dim], step):
        start = _with(box.start, dim, box.start[dim] + low)
        part = Box(box.tensor, start, _with(box.shape, dim, min(step, box.shape[dim] - low)))
        parts.extend(split(part, elements))
    return parts


def refine(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes that cover what the boxes of one tensor cover; each of those contains such a box or misses it."""
    distinct = sorted(set(boxes), key=lambda box: (box.start, box.shape))
    if not distinct or _tiles_one_dimension(distinct):
        return distinct
    cuts = [
        sorted({edge for box in distinct for edge in (box.start[d], box.start[d] + box.shape[d])})
        for d in range(len(distinct[0].shape))
    ]
    cells = []
    for corners in product(*(list(pairwise(edges)) for edges in cuts)):
        start = tuple(low for low, _ in corners)
        cell = Box(distinct[0].tensor, start, tuple(high - low for low, high in corners))
        if any(contains(box, cell) for box in distinct):
            cells.append(cell)
    return cells


def contains(outer: Piece | Box, inner: Piece | Box) -> bool:
    """Tell whether the inner box lies in the outer one."""
    return outer.tensor == inner.tensor and all(
        o <= i and i + n <= o + m for o, m, i, n in zip(outer.start, outer.shape, inner.start, inner.shape, strict=True)
    )


def common_boxes(shards: Iterable[Shard]) -> list[Box]:
    """Disjoint boxes of all tensors in the shards, so fine that every shard holds each of them wholly or not at all."""
    found: dict[str, dict[Box, None]] = {}
    for shard in {id(shard): shard for shard in shards}.values():
        for piece in shard.pieces:
            found.setdefault(piece.tensor, {})[piece.box] = None
    return [box for boxes in found.values() for box in refine(list(boxes))]


def _tiles_one_dimension(ordered: Sequence[Box]) -> bool:
    """Tell boxes, sorted by start, that differ in one dimension only and don't overlap there."""
    dims = range(len(ordered[0].shape))
    varying = [d for d in dims if len({(box.start[d], box.shape[d]) for box in ordered}) > 1]
    if len(varying) > 1:
        return False
    return all(a.start[d] + a.shape[d] <= b.start[d] for d in varying for a, b in pairwise(ordered))


def _with(index: Index, dim: int, value: int) -> Index:
    return index[:dim] + (value,) + index[dim + 1 :]
