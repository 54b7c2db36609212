"""Prove that shards in different layouts hold the same weights: checksums of the same boxes, compared over all ranks.

The checksum of a box is the sum, modulo 2^64, over its elements of

    wrap32(bits of the element * column weight) * row weight

with odd pseudo-random weights that depend on the element's index in the Hugging Face tensor only. So it does not depend
on where the box lies in a parameter, checksums of disjoint boxes add up to that of their union, one changed element
always changes it, and so do values that changed places (but for a chance of about 2^-32).

A check reads all weights twice, which can cost as much as moving them. So a check may be one of `TURNS` turns: each
looks at every box, in the small ones at all rows and in the large ones at every TURNS-th row, another one each turn.
What goes wrong with a box as a whole (stale, misplaced, mixed up) is seen at once, one wrong row within TURNS checks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.weights.layout import Box, Index, Piece, Shard, contains, intersect

# Elements multiplied at once. On a CPU the products stay in the cache; elsewhere few large kernels are better.
_CPU_ELEMENTS = 1 << 17
_DEVICE_ELEMENTS = 1 << 26
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWEST = torch.iinfo(torch.int64).min
TURNS = 64
# Boxes with fewer rows or elements are always read as a whole.
_SMALL_ROWS, _SMALL_ELEMENTS = TURNS, 1 << 14


class Checksums:
    """The checksums of one rank's shard, parameter by parameter, in terms of boxes that all layouts share.

    `boxes`: as made by layout.common_boxes from the shards of all ranks that are compared, in the same order on all
    ranks. `label`: what errors call the shard.
    """

    def __init__(self, shard: Shard, boxes: Sequence[Box], label: str = "") -> None:
        self.label = label
        self.boxes = boxes
        self._slots: list[tuple[int, str]] = []  # box number, parameter
        self._bands: dict[str, list[_Band]] = {name: [] for name in shard.params}
        numbers: dict[str, list[int]] = {}
        for number, box in enumerate(boxes):
            numbers.setdefault(box.tensor, []).append(number)
        for name, pieces in shard.by_param.items():
            bands: dict[tuple, list[tuple[int, Piece]]] = {}
            for piece in pieces:
                for number in numbers[piece.tensor]:
                    box = boxes[number]
                    if contains(piece, box):
                        inside = Piece(*box, name, piece.place(box))
                        slot = len(self._slots)
                        self._slots.append((number, name))
                        bands.setdefault(_columns(inside), []).append((slot, inside))
                    else:
                        assert intersect(piece, box) is None, f"{box} is only partly in {piece}"
            self._bands[name] = [_Band(shard.params[name], columns, held) for columns, held in bands.items()]
        self._values = torch.zeros(len(self._slots), dtype=torch.int64)
        self._turn: int | None = None
        self._sums: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.forget()

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Take the values that a parameter has now. On an accelerator nothing waits for the result."""
        if self._turn is not None and tensor.device.type == "cpu":
            values = self._values.numpy()
            for band in self._bands[name]:
                values[band.places] = band.few_sums(tensor, self._turn % TURNS)
        else:
            self._sums[name] = [(band.slots, band.sums(tensor, self._turn)) for band in self._bands[name]]
        self._missing.discard(name)

    def update_all(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take the values that all parameters of the shard have now."""
        for name in self._bands:
            self.update(name, params[name])

    def values(self) -> list[tuple[int, str, int]]:
        """Box number, parameter, checksum, of all in the shard. Raises RuntimeError for a parameter without update."""
        self._settle()
        return [(box, name, value) for (box, name), value in zip(self._slots, self._values.tolist(), strict=True)]

    def extremes(self) -> torch.Tensor:
        """[2, boxes] on the CPU: each box's largest checksum, and largest complement; the lowest number if not held."""
        self._settle()
        numbers = torch.tensor([box for box, _ in self._slots], dtype=torch.int64)
        both = torch.full((2, len(self.boxes)), _LOWEST, dtype=torch.int64)
        for row, values in zip(both, (self._values, ~self._values), strict=True):
            row.scatter_reduce_(0, numbers, values, "amax")
        return both

    def forget(self, turn: int | None = None) -> None:
        """The weights are about to change: every parameter needs an update again.

        `turn`: a number that all ranks and sides have in common chooses the rows that are read then; None: all rows.
        """
        self._turn = turn
        self._missing = {name for name, bands in self._bands.items() if bands}

    def _settle(self) -> None:
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise RuntimeError(
                f"{self.label or 'shard'}: no checksum of {len(self._missing)} parameters, among them {some}"
            )
        new = [both for sums in self._sums.values() for both in sums]
        if new:
            slots, values = zip(*new, strict=True)
            self._values[torch.cat(slots)] = torch.cat(values).cpu()
        self._sums.clear()


def verify(sides: Sequence[Checksums], world: int = 1, group: dist.ProcessGroup | None = None, most: int = 4) -> None:
    """Check on all ranks together that each box has one checksum, wherever it is held.

    `sides`: this rank's shards, training first. `group`: one for CPU tensors. Raises RuntimeError on every rank, with
    the same text: for the first `most` slices that differ, the tensor, the slice, and the parameters and ranks that
    differ from the lowest rank that trains it. The sides need new updates afterwards.
    """
    both = torch.stack([side.extremes() for side in sides]).amax(0)
    if world > 1:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    wrong = (both[0] != ~both[1]).nonzero().flatten().tolist()
    if wrong:
        shown = set(wrong[:most])
        mine = [(number, side.label, *held) for side in sides for number, *held in side.values() if number in shown]
        everyone = gather(mine, group) if world > 1 else [mine]
        found = [(number, label, rank, *held) for rank, part in enumerate(everyone) for number, label, *held in part]
        raise RuntimeError(_explain(sides[0], len(wrong), found))
    for side in sides:
        side.forget()


def piece_checksum(tensor: torch.Tensor, piece: Piece | Box) -> int:
    """The checksum of a tensor that holds the piece and nothing else."""
    inside = Piece(piece.tensor, piece.start, piece.shape, "", (0,) * len(piece.shape))
    band = _Band(piece.shape, _columns(inside), [(0, inside)])
    return int(band.sums(tensor)[0])


def shard_checksums(shard: Shard, params: Mapping[str, torch.Tensor], boxes: Sequence[Box]) -> dict[Box, int]:
    """The checksum of each of the boxes that the shard holds."""
    checksums = Checksums(shard, boxes)
    checksums.update_all(params)
    return {boxes[number]: value for number, _, value in checksums.values()}


class _Band:
    """The boxes in one parameter that share their columns: their checksums are sums over rows of one matrix product."""

    def __init__(self, shape: Index, columns: tuple, held: list[tuple[int, Piece]]) -> None:
        self._flat, (self._low, self._width), start = columns
        self._whole = self._flat or self._width == shape[-1]
        self.places = np.array([slot for slot, _ in held])
        self.slots = torch.from_numpy(self.places)
        segments = []  # first row in the parameter as a matrix, row weights, number of the box in `held`
        for n, (_, piece) in enumerate(held):
            segments.extend((row, weights, n) for row, weights in _row_weights(shape, piece))
        self._first = min(row for row, _, _ in segments)
        rows = max(row + len(weights) for row, weights, _ in segments) - self._first
        self._row_weights = torch.zeros(rows, dtype=torch.int64)  # zero: rows of none of the boxes
        self._box = torch.zeros(rows, dtype=torch.int64)
        turn_of_row = torch.full((rows,), -1, dtype=torch.int64)  # -1: read in every turn
        for row, weights, n in segments:
            here = slice(row - self._first, row - self._first + len(weights))
            self._row_weights[here] = weights
            self._box[here] = n
            piece = held[n][1]
            if len(weights) >= _SMALL_ROWS and piece.elements >= _SMALL_ELEMENTS:
                first = piece.start[0] if self._flat else piece.start[-2]
                turn_of_row[here] = torch.arange(first, first + len(weights)) % TURNS
        self._column_weights = (
            torch.ones(1, dtype=torch.int32) if self._flat else _weights(1, start, start + self._width).to(torch.int32)
        )
        # Rows in the order of their turns, those of every turn first, and where each turn's begin.
        held_rows = (self._row_weights != 0).nonzero().flatten()
        turn_of_row = turn_of_row[held_rows]
        self._by_turn = held_rows[torch.argsort(turn_of_row, stable=True)]
        self._ends = torch.cumsum(torch.bincount(turn_of_row + 1, minlength=TURNS + 1), 0).tolist()
        # On a CPU the arrays are in this order too, so that a turn's are views of them.
        self._weights_by_turn = self._row_weights[self._by_turn].numpy()
        self._box_by_turn = self._box[self._by_turn].numpy()
        self._rows_by_turn = (self._by_turn + self._first).numpy()
        # How far apart a turn's rows are, if they are one run in the parameter: all of it is in turns, or nothing.
        self._apart = 0 if len(segments) > 1 else 1 if self._ends[0] else TURNS

    @torch.no_grad()
    def sums(self, tensor: torch.Tensor, turn: int | None = None) -> torch.Tensor:
        """[boxes of the band] int64, on the tensor's device."""
        device = tensor.device
        if self._row_weights.device != device:
            self._row_weights = self._row_weights.to(device)
            self._column_weights = self._column_weights.to(device)
            self._box = self._box.to(device)
            self._by_turn = self._by_turn.to(device)
        matrix = (
            tensor.detach().view(_INTEGERS[tensor.element_size()]).reshape(-1, 1 if self._flat else tensor.shape[-1])
        )
        matrix = matrix[self._first : self._first + len(self._row_weights)]
        chosen, weights, box = None, self._row_weights, self._box
        if turn is not None:
            chosen = torch.cat([self._by_turn[part] for part in self._parts(turn % TURNS)])
            weights, box = weights[chosen], box[chosen]
        rows = len(weights)
        step = max(1, (_CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS) // self._width)
        sums = torch.empty(rows, dtype=torch.int64, device=device)
        for low in range(0, rows, step):
            some = matrix[low : low + step] if chosen is None else matrix.index_select(0, chosen[low : low + step])
            if not self._whole:
                some = some[:, self._low : self._low + self._width]
            torch.sum(some * self._column_weights, 1, dtype=torch.int64, out=sums[low : low + step])
        sums *= weights
        if len(self.slots) == 1:
            return sums.sum(0, keepdim=True)
        return torch.zeros(len(self.slots), dtype=torch.int64, device=device).index_add_(0, box, sums)

    def _parts(self, turn: int) -> list[slice]:
        """Where a turn's rows are, among those in the order of turns."""
        parts = slice(0, self._ends[0]), slice(self._ends[turn], self._ends[turn + 1])
        return [part for part in parts if part.stop > part.start]

    def few_sums(self, tensor: torch.Tensor, turn: int) -> np.ndarray:
        """As `sums`, on a CPU: a turn's rows are few, what counts are the calls, and numpy's cost less than torch's."""
        integers = _INTEGERS[tensor.element_size()]
        values = np.from_dlpack(tensor.detach().view(integers))  # a tensor that numpy() has shown cannot be resized
        matrix = values.reshape(-1, 1 if self._flat else tensor.shape[-1])
        if not self._whole:
            matrix = matrix[:, self._low : self._low + self._width]
        columns = self._column_weights.numpy()
        found = np.zeros(len(self.places), dtype=np.int64)
        step = max(1, _CPU_ELEMENTS // self._width)
        for part in self._parts(turn):
            for low in range(part.start, part.stop, step):
                here = slice(low, min(low + step, part.stop))
                rows, weights = self._rows_by_turn[here], self._weights_by_turn[here]
                some = matrix[rows[0] : rows[-1] + 1 : self._apart] if self._apart else matrix.take(rows, axis=0)
                sums = some[:, 0].astype(np.int64) if self._flat else (some * columns).sum(1, dtype=np.int64)
                if len(found) == 1:
                    found += sums @ weights
                else:
                    np.add.at(found, self._box_by_turn[here], sums * weights)
        return found


def _columns(piece: Piece) -> tuple:
    """Whether the tensor is a vector (a column of rows); where its columns are in the parameter, and in the tensor."""
    if len(piece.shape) == 1:
        return True, (0, 1), 0
    return False, (piece.at[-1], piece.shape[-1]), piece.start[-1]


def _row_weights(shape: Index, piece: Piece) -> list[tuple[int, torch.Tensor]]:
    """First row in the parameter (as a matrix) and weights, of each run of consecutive rows of a piece."""
    vector = len(piece.shape) == 1
    start, extent = (piece.start, piece.shape) if vector else (piece.start[:-1], piece.shape[:-1])
    at, size = (piece.at, shape) if vector else (piece.at[:-1], shape[:-1])
    lead = len(at) - len(start)
    runs = []
    for outer in product(*(range(n) for n in extent[:-1])):
        where = at[:lead] + tuple(a + o for a, o in zip(at[lead:-1], outer, strict=True)) + at[-1:]
        row = sum(index * math.prod(size[d + 1 :]) for d, index in enumerate(where))
        weights = _weights(0, start[-1], start[-1] + extent[-1])
        for d, (first, o) in enumerate(zip(start[:-1], outer, strict=True)):
            weights = weights * _weights(2 + d, first + o, first + o + 1)
        runs.append((row, weights))
    return runs


def _weights(kind: int, low: int, high: int) -> torch.Tensor:
    """Odd pseudo-random int64 weights of indices low to high; `kind` tells rows, columns and outer dimensions apart."""
    return _table(kind, max(1024, 1 << (high - 1).bit_length()))[low:high]


@lru_cache(maxsize=64)
def _table(kind: int, length: int) -> torch.Tensor:
    # The mixing steps of splitmix64 (https://prng.di.unimi.it/splitmix64.c), its constants as signed integers.
    x = (torch.arange(length, dtype=torch.int64) + (kind << 40)) * -7046029254386353131
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def _explain(trained: Checksums, count: int, found: list[tuple[int, str, int, str, int]]) -> str:
    """`found`: box number, label of the side, rank, parameter and checksum, of every copy of the boxes that differ."""
    lines = [f"weights differ between ranks or between training and rollout, in {count} slices of tensors:"]
    for number in dict.fromkeys(number for number, *_ in found):
        copies = [copy for copy in found if copy[0] == number]
        _, label, rank, name, value = next(copy for copy in copies if copy[1] == trained.label)
        odd = [f"{name} of {label} on rank {rank}" for _, label, rank, name, other in copies if other != value]
        others = ", ".join(odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
        lines.append(
            f"  {trained.boxes[number]}: not as in {name} of {label} on rank {rank} ({len(copies) - len(odd)} of "
            f"{len(copies)} copies agree): {others}"
        )
    return "\n".join(lines)
