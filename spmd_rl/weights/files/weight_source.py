"""Read a model's weights slice by slice, whatever they are stored in: to fill a shard, or to compare."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from spmd_rl.weights.transfer.boxes import Box, Shard, split, view

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Source(Protocol):
    """A model's weights under their Hugging Face names: HfSource or CheckpointSource."""

    def dtype(self, tensor: str) -> torch.dtype:
        """As stored."""
        ...

    def copy(self, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor of the box's shape, cast to its dtype. Raises ValueError when the file is broken."""
        ...


def fill_shard(source: Source, shard: Shard, parameters: Mapping[str, torch.Tensor]) -> None:
    """Fill a shard's parameters (name -> tensor), cast to their dtype; padding is set to zero."""
    assert parameters.keys() >= shard.params.keys(), f"no tensor for {sorted(shard.params.keys() - parameters.keys())}"
    for name, size in shard.params.items():
        assert tuple(parameters[name].shape) == size, (
            f"{name} is {tuple(parameters[name].shape)}, its shard says {size}"
        )
    with torch.no_grad():
        for name in shard.params:
            if shard.padded(name):
                parameters[name].zero_()
        for piece in shard.pieces:
            source.copy(piece.box, view(parameters[piece.param], piece.at, piece.shape))


def first_difference(
    a: Source,
    b: Source,
    boxes: Iterable[Box],
    dtypes: Mapping[str, torch.dtype],
    most_elements: int,
    compared: Callable[[int], None] = lambda more: None,
) -> str | None:
    """Return the first element in which two sources differ, after a cast to these dtypes, bit for bit; None: nowhere.

    `compared` hears of the bytes of each slice that is the same.
    """
    for box in boxes:
        for part in split(box, most_elements):
            left = torch.empty(part.shape, dtype=dtypes[part.tensor])
            right = torch.empty_like(left)
            a.copy(part, left)
            b.copy(part, right)
            whole = _INTEGERS[left.element_size()]
            unequal = left.view(whole) != right.view(whole)
            if unequal.any():
                at = tuple(int(n) for n in unequal.nonzero()[0])
                where = ", ".join(str(n + first) for n, first in zip(at, part.start, strict=True))
                return (
                    f"{part.tensor}[{where}] is {left[at].item()!r} in the source and {right[at].item()!r} in what was "
                    f"written; {int(unequal.sum())} elements of {part} differ"
                )
            compared(left.nbytes)
    return None


def some(names: list[str], most: int = 3) -> str:
    """List the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
