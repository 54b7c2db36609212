"""One table for each model family, and the shards that follow from it."""

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.weights.families.dense import DENSE
from spmd_rl.weights.families.table import MEGATRON_CUTS, VLLM_CUTS, Row, Sizes, boxes
from spmd_rl.weights.layout import Index, Piece, Shard

FAMILIES: dict[str, tuple[Row, ...]] = {"llama": DENSE, "qwen2": DENSE, "qwen3": DENSE}

# The fields of a shape that a shard depends on: what the caches below are keyed by (a shape may hold a dict).
_FIELDS = tuple(Sizes.__annotations__)


def hf_tensors(shape: Sizes) -> dict[str, Index]:
    """Names and shapes of the tensors that a Hugging Face directory of the model holds, in the model's order."""
    return {box.tensor: box.shape for row, layer in _walk(shape) for box in boxes(row, shape, layer)}


def hf_shard(shape: Sizes) -> Shard:
    """The whole model under its Hugging Face names."""
    tensors = hf_tensors(shape)
    pieces = (Piece(name, (0,) * len(size), size, name, (0,) * len(size)) for name, size in tensors.items())
    return Shard(tensors, tuple(pieces))


def megatron_shard(shape: Sizes, layout: TrainLayout, rank: int) -> Shard:
    """What a rank trains; data parallel ranks share one object. Vocabulary padding: a multiple of the tensor size."""
    at = layout.coords(rank)
    return _megatron_shard(_key(shape), layout.tensor, at.tensor, layout.pipeline, at.pipeline)


def vllm_shard(shape: Sizes, layout: RolloutLayout, rank: int) -> Shard:
    """What a rank's engine holds (vLLM 0.32); replicas share one object. Vocabulary padding: a multiple of 64."""
    return _vllm_shard(_key(shape), layout.tensor, layout.tensor_rank(rank))


def stage_layers(layers: int, pipeline: int, stage: int) -> range:
    """The layers of a pipeline stage."""
    if layers % pipeline:
        raise ValueError(f"parallel.pipeline = {pipeline}: the model's {layers} layers don't divide by it")
    return range(layers // pipeline * stage, layers // pipeline * (stage + 1))


@lru_cache(maxsize=1024)
def _megatron_shard(key: tuple, tensor: int, tensor_rank: int, pipeline: int, stage: int) -> Shard:
    shape = SimpleNamespace(**dict(zip(_FIELDS, key, strict=True)))
    mine = stage_layers(shape.layers, pipeline, stage)
    here = {"first": stage == 0, "last": stage == pipeline - 1}
    params, pieces = {}, []
    for row, layer in _walk(shape):
        present = layer in mine if row.stage == "layer" else here[row.stage]
        if not present or (row.copy and pipeline == 1):
            continue
        name = row.megatron.format(j=layer - mine.start)
        params[name], more = MEGATRON_CUTS[row.cut](name, boxes(row, shape, layer), shape, tensor_rank, tensor)
        pieces.extend(more)
    return Shard(params, tuple(pieces))


@lru_cache(maxsize=1024)
def _vllm_shard(key: tuple, tensor: int, tensor_rank: int) -> Shard:
    shape = SimpleNamespace(**dict(zip(_FIELDS, key, strict=True)))
    params, pieces = {}, []
    for row, layer in _walk(shape):
        if row.vllm is None:
            continue
        name = row.vllm.format(i=layer)
        params[name], more = VLLM_CUTS[row.cut](name, boxes(row, shape, layer), shape, tensor_rank, tensor)
        pieces.extend(more)
    return Shard(params, tuple(pieces))


def _key(shape: Sizes) -> tuple:
    return tuple(getattr(shape, field) for field in _FIELDS)


def _walk(shape: Sizes) -> Iterator[tuple[Row, int]]:
    """The rows of the model in its order: those before the layers, those of each layer, those after."""
    if shape.family not in FAMILIES:
        raise ValueError(f"model family {shape.family!r}: no table for it; there are tables for {', '.join(FAMILIES)}")
    rows = [row for row in FAMILIES[shape.family] if row.when(shape)]
    yield from ((row, 0) for row in rows if row.stage == "first")
    yield from ((row, layer) for layer in range(shape.layers) for row in rows if row.stage == "layer")
    yield from ((row, 0) for row in rows if row.stage == "last")
