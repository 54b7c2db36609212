"""Write Megatron's distributed checkpoints (its `torch_dist` format) without Megatron, chunk by chunk."""

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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

from spmd_rl.weights.files.checkpoint_layout import CONTENT
from spmd_rl.weights.files.checkpoint_reader import CONFIG, METADATA, Stored
from spmd_rl.weights.transfer.boxes import Box, Index

_COMMON = "common.pt"
_EMPTY = "__empty.distcp"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_chunks(
    path: Path,
    chunks: Iterable[Box],
    dtypes: Mapping[str, torch.dtype],
    fill: Callable[[Box, torch.Tensor], None],
    written: Callable[[int], None],
) -> list[Stored]:
    """Write a file of chunks, one in memory at a time: `fill` gives a chunk its values.

    `written` hears of the bytes of each. Raises OSError when they can't be written.
    """
    stored = []
    with path.open("wb") as stream:
        for chunk in chunks:
            values = torch.empty(chunk.shape, dtype=dtypes[chunk.tensor])
            fill(chunk, values)
            offset = stream.tell()
            try:
                torch.save(values, stream)
            except RuntimeError as error:  # torch's way to say that a write failed
                raise OSError(f"{path}: can't be written ({error})") from error
            stored.append(Stored(chunk, path.name, offset, stream.tell() - offset))
            written(values.nbytes)
        _sync(stream)
    return stored


def write_index(
    directory: Path,
    sizes: Mapping[str, Index],
    dtypes: Mapping[str, torch.dtype],
    stored: Iterable[Stored],
    empty: Iterable[str],
) -> None:
    """Make a directory of `.distcp` files a checkpoint; `empty`: keys of objects that hold None."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in stored:
        start = torch.Size(item.chunk.start)
        index = MetadataIndex(item.chunk.tensor, start, len(chunks[item.chunk.tensor]))
        chunks[item.chunk.tensor].append(ChunkStorageMetadata(start, torch.Size(item.chunk.shape)))
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
    with (directory / _COMMON).open("wb") as stream:
        torch.save({"content_metadata": CONTENT}, stream)
        _sync(stream)
    with (directory / METADATA).open("wb") as stream:
        pickle.dump(Metadata(content, None, places, StorageMeta(), "1.0.0"), stream)
        _sync(stream)
    (directory / CONFIG).write_text(json.dumps(_FORMAT), encoding="utf-8")


def _sync(stream: io.BufferedWriter) -> None:
    stream.flush()
    os.fsync(stream.fileno())
