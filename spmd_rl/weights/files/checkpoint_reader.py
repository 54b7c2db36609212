"""Read Megatron's distributed checkpoints (its `torch_dist` format) without Megatron, whatever layout wrote them.

The format is torch's: `.distcp` files of tensors saved one after the other, and `.metadata`, which says where each
chunk of each tensor lies. Megatron adds `metadata.json` and `common.pt`.
"""

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import foreign_checkpoint
from spmd_rl.models.weight_rows import Sizes
from spmd_rl.patches.checkpoint_pickles import read_index, read_plain
from spmd_rl.weights.files.checkpoint_layout import checkpoint_shard, chunks_of
from spmd_rl.weights.files.weight_source import some
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, Shard, intersect, view

METADATA = ".metadata"
CONFIG = "metadata.json"
_MODEL = ("decoder.", "embedding.", "output_layer.", "value_head.", "visual.")


class Stored(NamedTuple):
    """A chunk's place: `length` bytes of a file from `offset`."""

    chunk: Box
    file: str
    offset: int
    length: int


def is_checkpoint(path: Path) -> bool:
    """Tell a distributed checkpoint from any other directory."""
    return (path / CONFIG).is_file() and (path / METADATA).is_file()


class Checkpoint:
    """An open checkpoint: what tensors it has, and any box of them.

    `sizes` and `dtypes`: key -> shape, dtype of each tensor. Chunks that were read are kept, up to `cache_bytes` and at
    least the last one. Raises ValueError naming the file or key: not a checkpoint, a file that is missing or cut off.
    """

    def __init__(self, path: str | Path, cache_bytes: int = 128 << 20) -> None:
        self.path = Path(path)
        metadata = _read_metadata(self.path)
        self.sizes: dict[str, Index] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._stored: dict[str, list[Stored]] = {}
        self._starts: dict[str, list[int]] = {}
        self._reach: dict[str, int] = {}
        self._cache: OrderedDict[Stored, torch.Tensor] = OrderedDict()
        self._cache_bytes = cache_bytes
        for key, described in metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                continue
            self.sizes[key] = tuple(described.size)
            self.dtypes[key] = described.properties.dtype
            stored = [
                self._where(Box(key, tuple(chunk.offsets), tuple(chunk.sizes)), metadata) for chunk in described.chunks
            ]
            stored.sort(key=lambda item: item.chunk.start)
            self._stored[key] = stored
            # Chunks are looked up by their first row (0: no rows), of at most so many.
            self._starts[key] = [(*item.chunk.start, 0)[0] for item in stored]
            self._reach[key] = max(((*item.chunk.shape, 1)[0] for item in stored), default=0)
        self._check_files()

    def _where(self, chunk: Box, metadata: Metadata) -> Stored:
        found = metadata.storage_data.get(MetadataIndex(chunk.tensor, chunk.start))
        if found is None:
            raise ValueError(f"{self.path / METADATA}: says of no file that it holds {chunk}")
        if found.transform_descriptors:
            raise ValueError(f"{self.path}: {chunk} is stored as {found.transform_descriptors}, which isn't supported")
        return Stored(chunk, found.relative_path, found.offset, found.length)

    def _check_files(self) -> None:
        last: dict[str, Stored] = {}
        for stored in self._stored.values():
            for item in stored:
                if item.file not in last or item.offset > last[item.file].offset:
                    last[item.file] = item
        for file, item in last.items():
            where = self.path / file
            if not where.is_file():
                raise ValueError(f"{where}: not there; it holds {item.chunk}")
            if where.stat().st_size < item.offset + item.length:
                raise ValueError(
                    f"{where}: cut off: it has {where.stat().st_size} bytes, {item.chunk} ends at "
                    f"{item.offset + item.length}"
                )

    def copy(self, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor of the box's shape with a part of a checkpoint tensor, cast to the target's dtype."""
        copied = 0
        starts = self._starts[box.tensor]
        first, rows = (*box.start, 0)[0], (*box.shape, 1)[0]
        low, high = bisect_right(starts, first - self._reach[box.tensor]), bisect_left(starts, first + rows)
        for item in self._stored[box.tensor][low:high]:
            common = intersect(item.chunk, box)
            if common is None:
                continue
            there = tuple(a - b for a, b in zip(common.start, item.chunk.start, strict=True))
            here = tuple(a - b for a, b in zip(common.start, box.start, strict=True))
            view(target, here, common.shape).copy_(view(self._load(item), there, common.shape))
            copied += common.elements
        if copied != box.elements:
            raise ValueError(f"{self.path}: holds {copied} of the {box.elements} elements of {box}")

    def _load(self, item: Stored) -> torch.Tensor:
        if item in self._cache:
            self._cache.move_to_end(item)
            return self._cache[item]
        while self._cache and sum(t.nbytes for t in self._cache.values()) + item.length > self._cache_bytes:
            self._cache.popitem(last=False)
        file = self.path / item.file
        what = f"{file}: {item.chunk} can't be read at {item.offset}"
        try:
            with file.open("rb") as stream:
                values = read_plain(_create_file_view(stream, item.offset, item.length), what)
        except OSError as error:
            raise ValueError(f"{what} ({_first_line(error)})") from error
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != item.chunk.shape:
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(f"{file}: {item.chunk} should be at {item.offset}, there is {found}")
        self._cache[item] = values
        return values


class CheckpointSource:
    """A Megatron checkpoint, converted or saved by training, as the model that `shape` describes.

    Raises ValueError naming the first keys when the checkpoint is of another model.
    """

    def __init__(self, path: str | Path, shape: Sizes, cache_bytes: int = 128 << 20):
        self.checkpoint = Checkpoint(path, cache_bytes)
        whole = checkpoint_shard(shape)
        self._pieces = whole.by_tensor
        _check_model(self.checkpoint, whole, shape)

    def dtype(self, tensor: str) -> torch.dtype:
        return self.checkpoint.dtypes[self._pieces_of(tensor)[0].param]

    def copy(self, box: Box, target: torch.Tensor) -> None:
        pieces = self._pieces_of(box.tensor)
        for part, at in chunks_of(box._replace(tensor=pieces[0].tensor), pieces):
            shape = part.shape[len(part.shape) - len(box.shape) :]
            self.checkpoint.copy(part, view(target, at, shape).view(part.shape))

    def _pieces_of(self, tensor: str) -> tuple[Piece, ...]:
        # A tied model's head is its embedding.
        tied = tensor == "lm_head.weight" and tensor not in self._pieces
        return self._pieces["model.embed_tokens.weight" if tied else tensor]


def _check_model(checkpoint: Checkpoint, whole: Shard, shape: Sizes) -> None:
    """Raise ValueError unless a checkpoint has a model's tensors, of the right shapes, and no others of a model."""
    held = {key: size for key, size in checkpoint.sizes.items() if key.startswith(_MODEL)}
    missing = [key for key in whole.params if key not in held]
    unexpected = [key for key in held if key not in whole.params]
    what = f"{checkpoint.path}: not a {shape.family} model of {shape.layers} layers as its config.json describes it"
    if any(key.startswith("decoder.layers.") and not key.split(".")[2].isdigit() for key in held):
        raise ValueError(
            f"{checkpoint.path}: its layers are stacked in one tensor ({some(unexpected)}); "
            "save it with sharded_state_dict(metadata={'non_homogeneous_layers': True})"
        )
    if missing or unexpected:
        lacks = [f"it lacks {some(missing)}"] if missing else []
        has = [f"it has {some(unexpected)}"] if unexpected else []
        raise ValueError(f"{what}: {' and '.join(lacks + has)}")
    for key, size in whole.params.items():
        found = held[key]
        padded = key in ("embedding.word_embeddings.weight", "output_layer.weight")
        if found != size and not (padded and found[1:] == size[1:] and found[0] > size[0]):
            raise ValueError(f"{what}: {key} has shape {found}, config.json means {size}")
        if not checkpoint.dtypes[key].is_floating_point:
            raise ValueError(f"{what}: {key} is {checkpoint.dtypes[key]}")


def _read_metadata(path: Path) -> Metadata:
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    if foreign := foreign_checkpoint(path, "checkpoint"):
        raise ConfigError(foreign)
    if not is_checkpoint(path):
        lacking = CONFIG if not (path / CONFIG).is_file() else METADATA
        raise ValueError(f"{path}: no {lacking} in it; it isn't a Megatron checkpoint, or wasn't finished")
    try:
        form = json.loads((path / CONFIG).read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / CONFIG}: not what Megatron writes ({_first_line(error)})") from error
    if form != "torch_dist":
        raise ValueError(f"{path}: its format is {form}; only torch_dist is read")
    return read_index(path / METADATA)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
