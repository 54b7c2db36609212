"""Write Megatron's distributed checkpoints (its `torch_dist` format) without Megatron, chunk by chunk."""

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def write_chunk(stream: io.BufferedWriter, file: str, chunk: Box, values: torch.Tensor) -> Stored:
    """Append a chunk to an open file of that name."""
    offset = stream.tell()
    try:
        torch.save(values, stream)
    except RuntimeError as error:  # torch's way to say that a write failed
        raise OSError(
            f"{stream.name}: can't be written ({f'{type(error).__name__}: {error}'.splitlines()[0][:200]})"
        ) from error
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
    with (directory / _COMMON).open("wb") as stream:
        torch.save(dict(common), stream)
        _sync(stream)
    with (directory / METADATA).open("wb") as stream:
        pickle.dump(Metadata(content, None, places, StorageMeta(), "1.0.0"), stream)
        _sync(stream)
    (directory / CONFIG).write_text(json.dumps(_FORMAT))


def _sync(stream: io.BufferedWriter) -> None:
    stream.flush()
    os.fsync(stream.fileno())
