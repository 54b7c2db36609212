"""Cut a row of a family's table for a rank, in each of the three spellings."""

from collections.abc import Callable

from spmd_rl.models.weight_rows import Cut, Row, Sizes
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, cut_columns, cut_rows, stack


def boxes(row: Row, lengths: dict[str, int], layer: int, expert: int = 0) -> list[Box]:
    """The complete Hugging Face tensors of a row; `lengths`: the model's `dimensions`."""
    found = []
    for name, dims in row.hf.items():
        size = tuple(lengths[dim] for dim in dims.split())
        found.append(Box(name.format(i=layer, e=expert), (0,) * len(size), size))
    return found


Cutter = Callable[[str, list[Box], Sizes, int, int], tuple[Index, list[Piece]]]


def cut_whole(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Every rank holds everything."""
    return stack(param, tensors)


def cut_in_rows(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Equal parts of the rows."""
    full, pieces = stack(param, tensors)
    low, high = _part(full[0], rank, size, tensors)
    return (high - low, *full[1:]), cut_rows(pieces, low, high)


def cut_in_columns(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Equal parts of the columns."""
    full, pieces = stack(param, tensors)
    low, high = _part(full[1], rank, size, tensors)
    return (full[0], high - low), cut_columns(pieces, low, high)


def cut_each_in_rows(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Equal parts of the rows of each tensor, one below the other: [gate rows of the rank | up rows of the rank]."""
    parts = []
    for box in tensors:
        low, high = _part(box.shape[0], rank, size, tensors)
        parts.append(_rows(box, low, high))
    return stack(param, parts)


def cut_vocabulary(multiple_of: int) -> Cutter:
    """Equal parts of the rows after padding them to a multiple of `multiple_of` and of the number of ranks."""

    def cutter(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
        full, pieces = stack(param, tensors)
        multiple = multiple_of or size
        low, high = _part(-(-full[0] // multiple) * multiple, rank, size, tensors)
        return (high - low, *full[1:]), cut_rows(pieces, low, high)

    return cutter


def cut_megatron_qkv(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Equal parts of the rows [q of a group | its k | its v] for each group of heads that share one k and v."""
    _divide(shape.heads, size, "attention heads")
    q, k, v = tensors
    groups, d = shape.kv_heads, shape.head_dim
    per_group = _divide(shape.heads, groups, "attention heads") * d
    parts = []
    for g in range(groups):
        parts.append(_rows(q, g * per_group, (g + 1) * per_group))
        parts.extend(_rows(box, g * d, (g + 1) * d) for box in (k, v))
    full, pieces = stack(param, parts)
    low, high = _part(full[0], rank, size, tensors)
    return (high - low, *full[1:]), cut_rows(pieces, low, high)


def cut_vllm_qkv(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """[q heads of the rank | its k heads | its v heads]; with fewer k heads than ranks, neighbours hold the same one.

    Source: vLLM 0.32, QKVParallelLinear.
    """
    q, k, v = tensors
    heads = _divide(shape.heads, size, "attention heads") * shape.head_dim
    if size >= shape.kv_heads:
        first = rank // _divide(size, shape.kv_heads, "tensor ranks")
        last = first + 1
    else:
        per_rank = _divide(shape.kv_heads, size, "key/value heads")
        first, last = rank * per_rank, (rank + 1) * per_rank
    rows = (first * shape.head_dim, last * shape.head_dim)
    return stack(param, [_rows(q, rank * heads, (rank + 1) * heads), _rows(k, *rows), _rows(v, *rows)])


def cut_thirds_in_rows(param: str, tensors: list[Box], shape: Sizes, rank: int, size: int) -> tuple[Index, list[Piece]]:
    """Equal parts of the rows of each third: [q heads of the rank | its k heads | its v heads] of a vision tower."""
    assert shape.vision is not None
    _divide(shape.vision.heads, size, "heads of the vision tower")
    (qkv,) = tensors
    third = qkv.shape[0] // 3
    low, high = _part(third, rank, size, tensors)
    return stack(param, [_rows(qkv, n * third + low, n * third + high) for n in range(3)])


MEGATRON_CUTS: dict[Cut, Cutter] = {
    "whole": cut_whole,
    "rows": cut_in_rows,
    "columns": cut_in_columns,
    "vocabulary": cut_vocabulary(0),
    "qkv": cut_megatron_qkv,
    "gate_up": cut_each_in_rows,
    "thirds": cut_thirds_in_rows,
}
VLLM_CUTS: dict[Cut, Cutter] = {
    "whole": cut_whole,
    "rows": cut_in_rows,
    "columns": cut_in_columns,
    "vocabulary": cut_vocabulary(64),  # DEFAULT_VOCAB_PADDING_SIZE of vLLM
    "qkv": cut_vllm_qkv,
    "gate_up": cut_each_in_rows,
    "thirds": cut_thirds_in_rows,
}


def _rows(box: Box, low: int, high: int) -> Box:
    return Box(box.tensor, (box.start[0] + low, *box.start[1:]), (high - low, *box.shape[1:]))


def _part(length: int, rank: int, size: int, tensors: list[Box]) -> tuple[int, int]:
    part = _divide(length, size, f"rows or columns of {', '.join(box.tensor for box in tensors)}")
    return rank * part, (rank + 1) * part


def _divide(length: int, size: int, what: str) -> int:
    if length % size:
        raise ValueError(
            f"tensor parallel size: {length} {what} don't divide by {size}; use a size that divides {length}"
        )
    return length // size
