"""Prove that shards in different layouts hold the same weights: checksums of the same boxes, compared over all ranks.

The checksum of a box is the sum, modulo 2^64, over its elements of

    wrap32(bits of the element * column weight) * row weight

with odd pseudo-random weights that depend on the element's index in the Hugging Face tensor only (elements have 1, 2 or
4 bytes). So it does not depend on where the box lies in a parameter, checksums of disjoint boxes add up to that of
their union, one changed element always changes it, and so do values that changed places (but for a chance of 2^-32).

A check reads all weights twice, which can cost as much as moving them. So a check may be one of `TURNS` turns: each
looks at every box, in the small ones at all rows and in the large ones at every TURNS-th row, another one each turn.
What goes wrong with a box as a whole (stale, misplaced, mixed up) is seen at once, one wrong row within TURNS checks.

The same sums are computed in two ways: in a CPU's memory by one compiled loop (platforms/cpu_row_sums.py), elsewhere by
torch.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.platforms import current
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, Shard, contains, intersect

# Elements that torch multiplies at once: few large kernels, but small beside a device's memory.
_ELEMENTS = 1 << 25
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_LOWEST = torch.iinfo(torch.int64).min
TURNS = 64
# Boxes with fewer rows or elements are always read as a whole.
_SMALL_ROWS, _SMALL_ELEMENTS = TURNS, 1 << 14


class Checksums:
    """The checksums of one rank's shard, parameter by parameter, in terms of boxes that all layouts share.

    `boxes`: as made by common_boxes from the shards of all ranks that are compared, in the same order on all
    ranks. `label`: what errors call the shard.
    """

    def __init__(self, shard: Shard, boxes: Sequence[Box], label: str = "") -> None:
        self.label = label
        self.boxes = boxes
        self._slots: list[tuple[int, str]] = []  # box number, parameter
        self._bands: dict[str, list[_Band]] = {}
        numbers: dict[str, list[int]] = {}
        for number, box in enumerate(boxes):
            numbers.setdefault(box.tensor, []).append(number)
        for name, pieces in shard.by_param.items():
            bands: dict[_Columns, list[tuple[int, Piece]]] = {}
            for piece in pieces:
                for number in numbers[piece.tensor]:
                    box = boxes[number]
                    if contains(piece, box):
                        inside = Piece(*box, name, piece.place(box))
                        bands.setdefault(_columns(inside), []).append((number, inside))
                    else:
                        assert intersect(piece, box) is None, f"{box} is only partly in {piece}"
            self._bands[name] = []
            for held in bands.values():
                self._bands[name].append(_Band(shard.params[name], [inside for _, inside in held], len(self._slots)))
                self._slots.extend((number, name) for number, _ in held)
        self._numbers = torch.tensor([number for number, _ in self._slots], dtype=torch.int64)
        self._values = torch.zeros(len(self._slots), dtype=torch.int64)  # where the parameters are
        self.forget()

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Take the values that a parameter has now. On an accelerator nothing waits for the result."""
        if self._values.device != tensor.device:
            self._values = self._values.to(tensor.device)
        for band in self._bands[name]:
            band.update(tensor, self._turn, self._values)
        self._missing.discard(name)

    def update_all(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take the values that all parameters of the shard have now."""
        for name in self._bands:
            self.update(name, params[name])

    def values(self) -> list[tuple[int, str, int]]:
        """Box number, parameter, checksum, of all in the shard. Raises RuntimeError for a parameter without update."""
        return [(box, name, value) for (box, name), value in zip(self._slots, self._settled().tolist(), strict=True)]

    def extremes(self) -> torch.Tensor:
        """[2, boxes] on the CPU: each box's largest checksum, and largest complement; the lowest number if not held."""
        settled = self._settled()
        both = torch.full((2, len(self.boxes)), _LOWEST, dtype=torch.int64)
        for row, values in zip(both, (settled, ~settled), strict=True):
            row.scatter_reduce_(0, self._numbers, values, "amax")
        return both

    def forget(self, turn: int | None = None) -> None:
        """The weights are about to change: every parameter needs an update again.

        `turn`: a number that all ranks and sides have in common chooses the rows that are read then; None: all rows.
        """
        self._turn = turn
        self._missing = {name for name, bands in self._bands.items() if bands}

    def _settled(self) -> torch.Tensor:
        """[checksums] on the CPU."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise RuntimeError(
                f"{self.label or 'shard'}: no checksum of {len(self._missing)} parameters, among them {some}"
            )
        return self._values.cpu()


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


class _Band:
    """The boxes in one parameter that share their columns: their checksums are sums over rows of one matrix product.

    `held`: the boxes, as pieces of the parameter. `first`: where the first one's checksum goes among all of the shard.
    """

    def __init__(self, shape: Index, held: list[Piece], first: int) -> None:
        self._shape, self._slots = shape, slice(first, first + len(held))
        self._flat, (self._low, self._width), start = _columns(held[0])
        rows, weights, boxes, turns = [], [], [], []
        for number, piece in enumerate(held):
            for row, run in _row_weights(shape, piece):
                count = len(run)
                rows.append(torch.arange(row, row + count))
                weights.append(run)
                boxes.append(torch.full((count,), number))
                in_turns = count >= _SMALL_ROWS and piece.elements >= _SMALL_ELEMENTS
                low = piece.start[0] if self._flat else piece.start[-2]
                turns.append(torch.arange(low, low + count) % TURNS if in_turns else torch.full((count,), -1))
        # Rows in the order of their turns, those of every turn first, and where each turn's begin.
        turn = torch.cat(turns)
        order = torch.argsort(turn, stable=True)
        self._ends = torch.cumsum(torch.bincount(turn + 1, minlength=TURNS + 1), 0).tolist()
        columns = (
            torch.ones(1, dtype=torch.int32) if self._flat else _weights(1, start, start + self._width).to(torch.int32)
        )
        table = torch.stack([torch.cat(part)[order] for part in (rows, weights, boxes)])  # [3, rows]
        pitch = 1 if self._flat else shape[-1]
        self._sizes = torch.tensor([math.prod(shape), pitch, self._low, self._width, len(order), len(held)])
        self._arrays = {torch.device("cpu"): (table, columns)}
        self._described = self._sizes.data_ptr(), table.data_ptr(), columns.data_ptr()

    def update(self, tensor: torch.Tensor, turn: int | None, values: torch.Tensor) -> None:
        """Write the boxes' checksums to their places in `values` [checksums of the shard] int64, on the same device."""
        assert tensor.shape == self._shape, f"{tuple(tensor.shape)} is not {self._shape}"
        read = (self._ends[-1], 0, 0) if turn is None else (self._ends[0], *self._ends[turn % TURNS : turn % TURNS + 2])
        row_sums = current().row_sums
        if row_sums is not None:
            tensor = tensor.contiguous()
            sums = values.data_ptr() + 8 * self._slots.start
            row_sums(tensor.element_size())(tensor.data_ptr(), *self._described, sums, *read)
        else:
            self._update_by_torch(tensor, read, values[self._slots])

    @torch.no_grad()
    def _update_by_torch(self, tensor: torch.Tensor, read: tuple[int, int, int], sums: torch.Tensor) -> None:
        """Do what row_sums of platforms/cpu_row_sums.py does, on any device, in few large kernels."""
        # Where whole numbers are added and multiplied modulo a power of two, whatever the order.
        place = tensor.device if current().wraps_integers else torch.device("cpu")
        rows = self._arrays_on(tensor.device)[0][0]
        (_, weights, boxes), columns = self._arrays_on(place)
        matrix = tensor.view(_INTEGERS[tensor.element_size()]).reshape(-1, 1 if self._flat else tensor.shape[-1])
        every, first, last = read
        total = torch.zeros_like(sums, device=place)
        step = max(1, _ELEMENTS // self._width)
        for begin, end in ((0, every), (first, last)):
            for low in range(begin, end, step):
                here = slice(low, min(low + step, end))
                some = matrix.index_select(0, rows[here])[:, self._low : self._low + self._width].to(place)
                total.index_add_(0, boxes[here], (some * columns).sum(1, dtype=torch.int64) * weights[here])
        sums.copy_(total)

    def _arrays_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._arrays:
            table, columns = self._arrays[torch.device("cpu")]
            self._arrays[device] = table.to(device), columns.to(device)
        return self._arrays[device]


_Columns = tuple[bool, tuple[int, int], int]


def _columns(piece: Piece) -> _Columns:
    """Return: it is a vector (a column of rows); first column and width in the parameter; first one in the tensor."""
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
