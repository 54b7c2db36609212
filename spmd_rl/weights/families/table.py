"""Cut the rows of a family's table for a rank, in each of the three spellings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from spmd_rl.models.model_shape import Experts, LatentAttention
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, cut_columns, cut_rows, stack

Cut = Literal["whole", "rows", "columns", "vocabulary", "qkv", "gate_up"]


class Sizes(Protocol):
    """What the tables read of a model's shape (config.model_shape.ModelShape)."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None
    mla: LatentAttention | None
    head: str
    labels: int


def always(shape: Sizes, layer: int) -> bool:
    """Every layer of every model of the family has the row."""
    return True


@dataclass(frozen=True)
class Row:
    """One parameter: the Hugging Face tensors in it, and its name and cut in a shard.

    `hf` maps a name to its dimensions, by name (see `dimensions`). In names, `{i}` is the layer, `{j}` the layer
    counted from the first one of the model chunk that trains it, `{e}` the expert. `stage`: the pipeline stage that
    holds it. `megatron` or `vllm` None: that side has no parameter of its own (or has the tensors in another row).
    `when`: whether a layer of a model has the row. `copy`: a second copy of a tensor, which a stage holds only when
    another stage holds the first. `experts`: there is one for each expert; a training rank has a parameter for each of
    its experts, an engine has them in one, stacked along a leading dimension.
    """

    hf: dict[str, str]
    megatron: str | None
    vllm: str | None
    cut: Cut
    stage: Literal["first", "layer", "last"] = "layer"
    when: Callable[[Sizes, int], bool] = always
    copy: bool = False
    experts: bool = False


def dimensions(shape: Sizes) -> dict[str, int]:
    """The lengths that the tables call by name."""
    lengths = {
        "one": 1,
        "hidden": shape.hidden,
        "head": shape.head_dim,
        "q": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "ffn": shape.ffn,
        "vocabulary": shape.vocabulary,
        "labels": shape.labels,
    }
    if shape.experts is not None:
        lengths |= {
            "experts": shape.experts.count,
            "expert_ffn": shape.experts.ffn,
            "shared_ffn": shape.experts.shared_ffn,
        }
    if shape.mla is not None:
        mla = shape.mla
        lengths |= {
            "q_rank": mla.q_rank,
            "kv_rank": mla.kv_rank,
            "kv_down": mla.kv_rank + mla.rope_dim,
            "kv_up": shape.heads * (mla.nope_dim + mla.v_dim),
            "v": shape.heads * mla.v_dim,
        }
    return lengths


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


MEGATRON_CUTS: dict[Cut, Cutter] = {
    "whole": cut_whole,
    "rows": cut_in_rows,
    "columns": cut_in_columns,
    "vocabulary": cut_vocabulary(0),
    "qkv": cut_megatron_qkv,
    "gate_up": cut_each_in_rows,
}
VLLM_CUTS: dict[Cut, Cutter] = {
    "whole": cut_whole,
    "rows": cut_in_rows,
    "columns": cut_in_columns,
    "vocabulary": cut_vocabulary(64),  # DEFAULT_VOCAB_PADDING_SIZE of vLLM
    "qkv": cut_vllm_qkv,
    "gate_up": cut_each_in_rows,
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
