"""Read a checkpoint's pickles with readers that know what they may name: a pickle could otherwise run anything.

There are three kinds: the index (`.metadata`), and `common.pt` and the byte objects between the tensors, which are
torch's archives. torch and Megatron-Core read the first and the last without limits.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from spmd_rl.patches.patch import EVERYWHERE, MEGATRON_CORE, Patch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_TORCH = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint"
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing"
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPES += ("int64", "int32", "int16", "int8", "uint8", "bool")
# All that an index may name.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *_DTYPES),
    "collections": ("OrderedDict", "defaultdict"),
}


class _SomePath:
    """Stands for the path that a checkpoint was written to, which nobody asks for."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts


def _member(kind: Any, name: str) -> Enum:
    """Return an enumeration's member: Python 3.11.0 to 3.11.3 write members as getattr(kind, name)."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it takes {name!r} of {kind!r}, which is no member of an enumeration")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _member
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath", "Path"):
            return _SomePath
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's index has")
        return super().find_class(module, name)


def read_index(file: Path) -> Metadata:
    """Return the index of a distributed checkpoint.

    Raises ValueError that names the file: it is broken, it names what no index has, or it leads out of its directory.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with file.open("rb") as stream:
            index = _Unpickler(stream).load()
    except Exception as error:  # a broken pickle fails in any way
        raise ValueError(f"{file}: broken ({_first_line(error)})") from error
    if not isinstance(index, Metadata) or not isinstance(getattr(index, "storage_data", None), dict):
        raise ValueError(f"{file}: broken (it holds {type(index).__name__})")
    directory = file.parent.resolve()
    for relative in {str(getattr(place, "relative_path", "")) for place in index.storage_data.values()}:
        if not relative or (directory / relative).resolve().parent != directory:
            raise ValueError(f"{file}: says that something lies in {relative!r}, outside of the directory")
    return index


def read_plain(stream: IO[bytes] | Path, what: str) -> Any:
    """Return what torch saved there, if it is tensors and plain values. Raises ValueError that names `what`."""
    try:
        with _nothing_else_is_safe():
            return torch.load(stream, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # as above
        text = str(error)
        names = (
            text.partition("Unsupported global: GLOBAL ")[2].partition(" ")[0]
            or (text.partition("Unsupported class ")[2].partition(" ")[0])
        )
        if names:
            raise ValueError(f"{what}: it names {names}, and only tensors and plain values are read") from error
        raise ValueError(f"{what}: broken ({_first_line(error)})") from error


@contextmanager
def _nothing_else_is_safe() -> Iterator[None]:
    """Without the classes that libraries have called safe: Megatron-Core, some for checkpoints of its own programs."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(others)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _restricted_index(original: Any) -> Any:
    assert original is not None, "torch reads the index of a checkpoint elsewhere"

    def read_metadata(self: Any, *args: Any, **options: Any) -> Metadata:
        file = Path(self._get_metadata_path(options.get("rank")))
        index = read_index(file)
        if getattr(index, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            index.storage_meta = StorageMeta()
        index.storage_meta.checkpoint_id = str(file.parent)  # where it is now, for what a planner has to say
        index.storage_meta.load_id = self.load_id
        return index

    return read_metadata


def _plain_objects(original: Any) -> Any:
    assert original is not None, "torch reads the objects of a checkpoint elsewhere"

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        place = self.metadata.storage_data[read_item.storage_index]
        file = Path(self.metadata.storage_meta.checkpoint_id or "") / place.relative_path
        found = read_plain(value, f"{file}: {read_item.storage_index.fqn}")
        if self.flatten_state_dict:
            from torch.distributed.checkpoint._nested_dict import set_element

            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)
        else:
            self.state_dict[read_item.dest_index.fqn] = found

    return load_bytes


def _plain_common(original: Any) -> Any:
    assert original is not None, "Megatron-Core reads common.pt elsewhere"

    def load_common(self: Any, checkpoint_dir: Any) -> Any:
        file = Path(checkpoint_dir) / "common.pt"
        try:
            return read_plain(file, str(file))
        except FileNotFoundError as error:
            raise ValueError(f"{file}: missing") from error

    return load_common


PATCHES = (
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
        platforms=EVERYWHERE,
        reason="torch unpickles the index of a checkpoint without limits, which runs whatever is written there",
        upstream=f"{_TORCH}/filesystem.py#L930",
        until="torch reads the index with an unpickler that knows what it may name, or stores it in another form",
        make=_restricted_index,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
        platforms=EVERYWHERE,
        reason="torch loads the objects in a checkpoint with weights_only=False, which runs whatever is written there",
        upstream=f"{_TORCH}/default_planner.py#L387",
        until="torch loads them with weights_only=True",
        make=_plain_objects,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.dist_checkpointing.strategies.common:TorchCommonLoadStrategy.load_common",
        platforms=EVERYWHERE,
        reason="Megatron-Core leaves to torch's default, which the environment can change, whether common.pt may run code",
        upstream=f"{_MEGATRON}/strategies/common.py#L68",
        until="Megatron-Core loads common.pt with weights_only=True",
        make=_plain_common,
    ),
)
