"""Make a rank's shard from the rows of its model's family."""

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.models import FAMILIES
from spmd_rl.models.weight_rows import Row, Sizes, dimensions
from spmd_rl.weights.families.cutters import MEGATRON_CUTS, VLLM_CUTS, Cutter, boxes
from spmd_rl.weights.transfer.boxes import Index, Piece, Shard, whole

# The fields of a shape that a shard depends on: what the caches below are keyed by (a shape may hold a dict).
_FIELDS = tuple(name for name, value in vars(Sizes).items() if isinstance(value, property))
_Key = tuple[Any, ...]
"""The values of a shape's _FIELDS."""


def hf_tensors(shape: Sizes) -> dict[str, Index]:
    """Return names and shapes of the tensors that a Hugging Face directory of the model holds, layer by layer."""
    lengths = dimensions(shape)
    return {
        box.tensor: box.shape
        for row, layer in _walk(shape)
        for expert in (range(shape.experts.count) if row.experts and shape.experts else (0,))
        for box in boxes(row, lengths, layer, expert)
    }


def hf_shard(shape: Sizes, tied_head: bool = False) -> Shard:
    """Return the whole model under its Hugging Face names.

    `tied_head`: with the embedding a second time, as the head: some directories of tied models store both.
    """
    tensors = hf_tensors(shape)
    pieces = [whole(name, size, name) for name, size in tensors.items()]
    if tied_head:
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        pieces.append(whole(embedding, tensors[embedding], head))
        tensors[head] = tensors[embedding]
    return Shard(tensors, tuple(pieces))


def megatron_shard(shape: Sizes, layout: TrainLayout, rank: int) -> Shard:
    """Return what a rank trains; ranks that train the same share one object.

    Vocabulary padding: a multiple of the tensor size. With a virtual pipeline, names begin with the number of the model
    chunk on the rank and a dot. Raises ValueError when the layout can't hold the model.
    """
    at = layout.coords(rank)
    chunks = layout.chunk_layers(shape.layers)
    mine = tuple(range(at.pipeline, len(chunks), layout.pipeline))
    experts = (layout.expert, at.expert, layout.expert_tensor, at.expert_tensor) if shape.experts else (1, 0, 1, 0)
    return _megatron_shard(_key(shape), layout.tensor, at.tensor, chunks, mine, *experts)


def vllm_shard(shape: Sizes, layout: RolloutLayout, rank: int) -> Shard:
    """Return what a rank's engine holds (vLLM 0.32); replicas share one object. Vocabulary padding: a multiple of 64.

    Raises ValueError when the layout can't hold the model.
    """
    experts = (layout.group, layout.group_rank(rank), layout.expert) if shape.experts else (1, 0, False)
    return _vllm_shard(_key(shape), layout.tensor, layout.tensor_rank(rank), *experts)


@lru_cache(maxsize=4096)
def _megatron_shard(
    key: _Key,
    tensor: int,
    tensor_rank: int,
    chunks: tuple[range, ...],
    mine: tuple[int, ...],
    expert: int,
    expert_rank: int,
    expert_tensor: int,
    expert_tensor_rank: int,
) -> Shard:
    shape = SimpleNamespace(**dict(zip(_FIELDS, key, strict=True)))
    lengths = dimensions(shape)
    held = _experts_of("parallel.expert", shape, expert, expert_rank)
    params: dict[str, Index] = {}
    pieces: list[Piece] = []
    for number, chunk in enumerate(mine):
        layers = chunks[chunk]
        prefix = f"{number}." if len(mine) > 1 else ""
        for row, layer in _walk(shape, layers, chunk == 0, chunk == len(chunks) - 1):
            if row.megatron is None or (row.copy and len(chunks) == 1):
                continue
            name, cutter = prefix + row.megatron.format(i=layer, j=layer - layers.start), MEGATRON_CUTS[row.cut]
            if not row.experts:
                params[name], more = cutter(name, boxes(row, lengths, layer), shape, tensor_rank, tensor)
                pieces.extend(more)
                continue
            shared = expert_tensor_rank, expert_tensor
            params[name], more = _stacked(row, name, cutter, lengths, layer, held, shape, shared)
            pieces.extend(more)
    return Shard(params, tuple(pieces))


@lru_cache(maxsize=4096)
def _vllm_shard(key: _Key, tensor: int, tensor_rank: int, group: int, group_rank: int, expert: bool) -> Shard:
    shape = SimpleNamespace(**dict(zip(_FIELDS, key, strict=True)))
    lengths = dimensions(shape)
    # Without expert parallelism all ranks of the group share each expert.
    spread = (group, group_rank) if expert else (1, 0)
    held = _experts_of("rollout.tensor x rollout.data", shape, *spread)
    shared = (0, 1) if expert else (group_rank, group)
    params: dict[str, Index] = {}
    pieces: list[Piece] = []
    for row, layer in _walk(shape):
        if row.vllm is None:
            continue
        name, cutter = row.vllm.format(i=layer), VLLM_CUTS[row.cut]
        if not row.experts:
            params[name], more = cutter(name, boxes(row, lengths, layer), shape, tensor_rank, tensor)
            pieces.extend(more)
            continue
        params[name], more = _stacked(row, name, cutter, lengths, layer, held, shape, shared)
        pieces.extend(more)
    return Shard(params, tuple(pieces))


def _stacked(
    row: Row,
    name: str,
    cutter: Cutter,
    lengths: dict[str, int],
    layer: int,
    held: range,
    shape: Sizes,
    shared: tuple[int, int],
) -> tuple[Index, list[Piece]]:
    """Return a rank's experts as one parameter; `shared`: its place among the ranks that share each, their number."""
    pieces: list[Piece] = []
    for local, e in enumerate(held):
        size, more = cutter(name, boxes(row, lengths, layer, e), shape, *shared)
        pieces.extend(Piece(*piece.box, name, (local, *piece.at)) for piece in more)
    return (len(held), *size), pieces


def _experts_of(knob: str, shape: Sizes, size: int, rank: int) -> range:
    """The experts of a rank, of `size` ranks that share them."""
    count = shape.experts.count if shape.experts else 0
    if count % size:
        raise ValueError(f"{knob} = {size}: the model's {count} experts don't divide by it")
    return range(count // size * rank, count // size * (rank + 1))


def _key(shape: Sizes) -> _Key:
    return tuple(getattr(shape, field) for field in _FIELDS)


def _walk(
    shape: Sizes, layers: range | None = None, first: bool = True, last: bool = True
) -> Iterator[tuple[Row, int]]:
    """The rows of some layers in the model's order, with those before all layers and those after, where asked for."""
    if shape.family not in FAMILIES:
        raise ValueError(f"model family {shape.family!r}: no table for it; there are tables for {', '.join(FAMILIES)}")
    rows = FAMILIES[shape.family].rows
    if first:
        for layer in range(shape.vision.layers if shape.vision else 0):
            yield from ((row, layer) for row in rows if row.stage == "tower")
        yield from ((row, 0) for row in rows if row.stage == "first" and row.when(shape, 0))
    for layer in layers if layers is not None else range(shape.layers):
        yield from ((row, layer) for row in rows if row.stage == "layer" and row.when(shape, layer))
    if last:
        yield from ((row, 0) for row in rows if row.stage == "last" and row.when(shape, 0))
