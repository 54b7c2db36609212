"""Spell the weights a fourth way: the keys and chunks of Megatron's distributed checkpoints.

There a tensor is whole, whatever the layout that wrote it, and stored as chunks. Layers count through the whole model
(Megatron's `non_homogeneous_layers`), the experts of a layer are stacked along a leading dimension, and gate and up
projections lie whole below each other. Vocabularies aren't padded.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.weight_rows import Sizes
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, Shard, contains, intersect, split

# What `sharded_state_dict(metadata=...)` has to be told for these keys; kept in the checkpoint for who loads it.
CONTENT = {"non_homogeneous_layers": True, "singleton_local_shards": False}

_EXPERTS = re.compile(r"\.mlp\.experts\.(?=linear)")
# Megatron's parallel layers save an empty "extra state" beside their weights and ask for it when they load; its
# replicated layers and the output layer don't.
_PARALLEL_LAYER = re.compile(r"(.*\.linear_(?!q_down|kv_down)\w+)\.weight")


def checkpoint_shard(shape: Sizes) -> Shard:
    """Return the whole model under a checkpoint's keys."""
    alone = megatron_shard(shape, TrainLayout(1, 1, 1), 0)
    params: dict[str, Index] = {}
    pieces: list[Piece] = []
    for name, size in alone.params.items():
        key = _EXPERTS.sub(".mlp.experts.experts.", name)
        params[key] = size
        pieces.extend(Piece(*piece.box, key, piece.at) for piece in alone.by_param[name])
    return Shard(params, tuple(pieces))


def extra_states(whole: Shard, shape: Sizes) -> list[str]:
    """Return the keys of the empty objects that Megatron's model asks for besides its tensors."""
    names = []
    for key in whole.params:
        layer = _PARALLEL_LAYER.fullmatch(key)
        if layer is not None:
            count = shape.experts.count if shape.experts is not None and ".experts.experts." in key else 1
            names += [f"{layer[1]}._extra_state/shard_{e}_{count}" for e in range(count)]
    return names


def rank_chunks(shape: Sizes, layout: TrainLayout, whole: Shard, most_elements: int) -> list[list[Box]]:
    """Return for each rank of a layout the parts of the checkpoint's tensors that it writes, in the model's order.

    A part that several ranks hold is the first one's. Boxes are of checkpoint tensors, at most so many elements each.
    Raises ValueError when the layout can't hold the model.
    """
    homes = whole.by_tensor
    seen: set[Box] = set()
    looked_at: set[int] = set()
    chunks: list[list[Box]] = []
    for rank in range(layout.world):
        shard = megatron_shard(shape, layout, rank)
        mine: list[Box] = []
        for pieces in shard.by_param.values() if id(shard) not in looked_at else ():
            new = [box for box in _in_checkpoint(pieces, homes) if box not in seen]
            seen.update(new)
            mine += [part for box in new for part in split(box, most_elements)]
        looked_at.add(id(shard))
        chunks.append(mine)
    covered = sum(box.elements for boxes in chunks for box in boxes)
    assert covered == whole.elements, f"{covered} of {whole.elements} elements are in some rank's chunks"
    return chunks


def _in_checkpoint(pieces: tuple[Piece, ...], homes: Mapping[str, tuple[Piece, ...]]) -> list[Box]:
    """Return the boxes of the checkpoint that one parameter of a rank makes up, as few as there are."""
    # Pieces that are moved by the same distance stay neighbours: together they are one box.
    together: dict[tuple[str, Index], list[Box]] = defaultdict(list)
    for piece in pieces:
        home = next(home for home in homes[piece.tensor] if contains(home, piece.box))
        at = home.place(piece.box)
        extent = (1,) * (len(at) - len(piece.shape)) + piece.shape
        here = (0,) * (len(at) - len(piece.at)) + piece.at
        moved = tuple(a - b for a, b in zip(at, here, strict=True))
        together[home.param, moved].append(Box(home.param, at, extent))
    boxes = []
    for (key, _), parts in together.items():
        low = tuple(min(part.start[d] for part in parts) for d in range(len(parts[0].start)))
        high = tuple(max(part.start[d] + part.shape[d] for part in parts) for d in range(len(low)))
        box = Box(key, low, tuple(b - a for a, b in zip(low, high, strict=True)))
        assert box.elements == sum(part.elements for part in parts), f"{box} isn't filled by its pieces"
        boxes.append(box)
    return boxes


def pieces_in(chunk: Box, pieces: Iterable[Piece]) -> Iterator[tuple[Box, Index]]:
    """Yield the Hugging Face boxes in a chunk of one checkpoint tensor, and where in the chunk each begins.

    `pieces`: those of the tensor. The place has the chunk's dimensions.
    """
    for piece in pieces:
        common = intersect(chunk, Box(piece.param, piece.at, piece.extent))
        if common is None:
            continue
        lead = len(piece.at) - len(piece.shape)
        moved = zip(piece.start, common.start[lead:], piece.at[lead:], strict=True)
        start = tuple(first + a - b for first, a, b in moved)
        place = tuple(a - b for a, b in zip(common.start, chunk.start, strict=True))
        yield Box(piece.tensor, start, common.shape[lead:]), place


def chunks_of(box: Box, pieces: Iterable[Piece]) -> Iterator[tuple[Box, Index]]:
    """Yield the parts of checkpoint tensors in a Hugging Face box, and where in the box each begins.

    `pieces`: those of the Hugging Face tensor.
    """
    for piece in pieces:
        common = intersect(piece, box)
        if common is None:
            continue
        at = piece.place(common)
        extent = (1,) * (len(at) - len(common.shape)) + common.shape
        yield Box(piece.param, at, extent), tuple(a - b for a, b in zip(common.start, box.start, strict=True))
