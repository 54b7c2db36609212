"""Megatron's distributed checkpoints on disk (its `torch_dist` format), read and written without Megatron.

The format is torch's: `.distcp` files of tensors saved one after the other, and `.metadata`, which says where each
chunk of each tensor lies. Megatron adds `metadata.json` and `common.pt`.
"""

import io
import json
import os
import pickle
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from spmd_rl.patches.checkpoint_pickles import read_index
from spmd_rl.weights.transfer.boxes import Box, Index, intersect
from spmd_rl.weights.transfer.weight_transfer import view

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
_EMPTY = "__empty.distcp"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a chunk lies: `length` bytes of a file from `offset`."""

    chunk: Box
    file: str
    offset: int
    length: int


def write_chunk(stream: io.BufferedWriter, file: str, chunk: Box, values: torch.Tensor) -> Stored:
    """Append a chunk to an open file of that name."""
    offset = stream.tell()
    try:
        torch.save(values, stream)
    except RuntimeError as error:  # torch's way to say that a write failed
        raise OSError(f"{stream.name}: can't be written ({_first_line(error)})") from error
    return Stored(chunk, file, offset, stream.tell() - offset)


def write_index(
    directory: Path,
    sizes: Mapping[str, Index],
    dtypes: Mapping[str, torch.dtype],
    stored: Iterable[Stored],
    empty: Iterable[str],
    common: Mapping[str, Any],
) -> None:
    """Make a directory of `.distcp` files a checkpoint.

    `empty`: keys of objects that hold None. `common`: what `common.pt` holds, plain values.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in stored:
        start, shape = torch.Size(item.chunk.start), torch.Size(item.chunk.shape)
        index = MetadataIndex(item.chunk.tensor, start, len(chunks[item.chunk.tensor]))
        chunks[item.chunk.tensor].append(ChunkStorageMetadata(start, shape))
        places[index] = _StorageInfo(item.file, item.offset, item.length)
    content: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtypes[key]), torch.Size(size), chunks[key])
        for key, size in sizes.items()
    }
    # One object serves all keys, which the format doesn't mind; in a list, as Megatron packs a rank's objects of a key.
    with (directory / _EMPTY).open("wb") as stream:
        torch.save([None], stream)
        length = stream.tell()
        _sync(stream)
    for key in empty:
        content[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(_EMPTY, 0, length)
    with (directory / COMMON).open("wb") as stream:
        torch.save(dict(common), stream)
        _sync(stream)
    with (directory / METADATA).open("wb") as stream:
        pickle.dump(Metadata(content, None, places, StorageMeta(), "1.0.0"), stream)
        _sync(stream)
    (directory / CONFIG).write_text(json.dumps(_FORMAT))


def is_checkpoint(path: Path) -> bool:
    """Whether the directory looks like a distributed checkpoint."""
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
        try:
            with file.open("rb") as stream:
                part = _create_file_view(stream, item.offset, item.length)
                values = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{file}: {item.chunk} can't be read at {item.offset} ({_first_line(error)})") from error
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != item.chunk.shape:
            what = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(f"{file}: {item.chunk} should be at {item.offset}, there is {what}")
        self._cache[item] = values
        return values


def _read_metadata(path: Path) -> Metadata:
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    if not is_checkpoint(path):
        lacking = CONFIG if not (path / CONFIG).is_file() else METADATA
        raise ValueError(f"{path}: no {lacking} in it; it isn't a Megatron checkpoint, or wasn't finished")
    try:
        form = json.loads((path / CONFIG).read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / CONFIG}: not what Megatron writes ({_first_line(error)})") from error
    if form != "torch_dist":
        raise ValueError(f"{path}: its format is {form}; only torch_dist is read")
    return read_index(path / METADATA)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _sync(stream: io.BufferedWriter) -> None:
    stream.flush()
    os.fsync(stream.fileno())
