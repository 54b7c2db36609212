"""Write a shard of every rank as one Hugging Face directory, streamed: no rank ever holds the model twice."""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.families.table import Sizes
from spmd_rl.weights.files.hf_reader import DTYPES, INDEX, SINGLE, check_headers, read_headers
from spmd_rl.weights.transfer.boxes import NOTHING, Box, Index, Shard, whole
from spmd_rl.weights.transfer.transfer_schedule import BUCKET_ELEMENTS, Schedule
from spmd_rl.weights.transfer.weight_transfer import WeightTransfer

WRITER = 0  # the rank that writes
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What belongs to a model directory besides the weights.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "*.py",
    "*preprocessor_config.json",
    "LICENSE*",
)


def export_hf(
    path: str | Path,
    source: str | Path,
    shape: Sizes,
    shards: Sequence[Shard],
    params: Mapping[str, torch.Tensor],
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    control: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> None:
    """All ranks together write the directory `path`: the weights in `params`, everything else from `source`.

    `shards`: every rank's source shard; `params`: this rank's. `dtype` None: as in the shards. The directory has the
    tensors that `source` has (but no rotary tables), in one file, or in files of at most `max_shard_bytes` and an
    index. One that is there already is replaced, and only when the new one is complete. Rank 0 writes, and holds a
    bucket or one tensor at a time; `path` exists when rank 0 returns. Raises ValueError: `path` is `source`, or
    something else than a model directory.
    """
    path, source = Path(path), Path(source)
    headers = read_headers(source) if rank == WRITER else {}
    names = gather(list(headers), control or group)[WRITER] if len(shards) > 1 else list(headers)
    whole_model = hf_shard(shape)
    if shape.tied and "lm_head.weight" in names:
        whole_model = with_head(whole_model)
    destinations = [whole_model if r == WRITER else NOTHING for r in range(len(shards))]
    mover = WeightTransfer(
        Schedule(shards, destinations, 0, bucket_elements).plan(rank), shards[rank], group, device, control
    )
    dtypes = mover.dtypes(params)
    if rank != WRITER:
        mover.run(params, {})
        return

    check_headers(source, headers, shape)
    check_target(path, source)
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    copy_companions(source, partial, dtype or dtypes.of(next(iter(whole_model.params))))
    dtype_of = {name: dtype or dtypes.of(whole_model.by_param[name][0].tensor) for name in whole_model.params}
    bytes_of = {name: math.prod(size) * dtype_of[name].itemsize for name, size in whole_model.params.items()}
    files = SafetensorsFiles(partial, group_tensors(bytes_of, max_shard_bytes), whole_model.params, dtype_of)
    files.create()
    left = set(whole_model.params)

    def write(name: str, tensor: torch.Tensor) -> None:
        files.write(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        left.remove(name)

    mover.run(params, write)
    files.close()
    assert not left, f"never written: {sorted(left)}"
    replace_directory(partial, path)


def check_target(path: Path, source: Path) -> None:
    """Raise ValueError when the directory must not be written to: it is the source, or holds no model."""
    if path.exists() and path.samefile(source):
        raise ValueError(f"export to {path}: that is model.path itself; write to another directory")
    if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
        raise ValueError(f"export to {path}: it exists and is no model directory; write to another one, or remove it")


def group_tensors(bytes_of: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """File name -> tensors: in the given order, in one file, or in files of at most so many bytes."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in bytes_of.items():
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": names for n, names in enumerate(groups, 1)}


class SafetensorsFiles:
    """Safetensors files whose headers are written first and whose tensors follow in any order, whole or in parts.

    Several processes may write to the same files: one of them calls `create`.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Sequence[str]],
        shapes: Mapping[str, Index],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._directory, self._files, self._shapes, self._dtypes = directory, files, shapes, dtypes
        self._headers: dict[str, bytes] = {}
        self._ends: dict[str, int] = {}
        self._place: dict[str, tuple[str, int]] = {}  # file, offset
        self._open: dict[str, int] = {}
        self.bytes_of = {
            name: math.prod(shapes[name]) * dtypes[name].itemsize for names in files.values() for name in names
        }
        for file, names in files.items():
            self._lay_out(file, names)

    def _lay_out(self, file: str, names: Sequence[str]) -> None:
        # Wide elements first, so that each tensor is aligned to its element size. Format: 8 bytes length of the header,
        # the header padded with spaces to 8 bytes, the tensors without gaps
        # (https://github.com/huggingface/safetensors#format).
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in sorted(names, key=lambda name: -self._dtypes[name].itemsize):
            header[name] = {
                "dtype": _DTYPE_NAMES[self._dtypes[name]],
                "shape": list(self._shapes[name]),
                "data_offsets": [offset, offset + self.bytes_of[name]],
            }
            offset += self.bytes_of[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._headers[file] = len(text).to_bytes(8, "little") + text
        for name in names:
            self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0]
        self._ends[file] = 8 + len(text) + offset

    def create(self, total: Mapping[str, object] | None = None) -> None:
        """Make the files with their headers, at full length, and an index where there are several.

        `total`: what the index says of the whole model; by default its size.
        """
        for file, header in self._headers.items():
            descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                _write_at(descriptor, header, 0)
                os.ftruncate(descriptor, self._ends[file])
            finally:
                os.close(descriptor)
        if list(self._files) != [SINGLE]:
            weight_map = {name: file for file, names in self._files.items() for name in names}
            index = {"metadata": total or {"total_size": sum(self.bytes_of.values())}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, box: Box, values: torch.Tensor) -> None:
        """Put a part of a tensor where it belongs; the part's elements are neighbours in the tensor."""
        size = self._shapes[box.tensor]
        strides = [math.prod(size[d + 1 :]) for d in range(len(size))]
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        last = sum((a + n - 1) * stride for a, n, stride in zip(box.start, box.shape, strides, strict=True))
        assert last - first + 1 == box.elements, f"{box} lies scattered in {box.tensor} {size}"
        dtype = self._dtypes[box.tensor]
        values = values.to(device="cpu", dtype=dtype).contiguous()
        file, offset = self._place[box.tensor]
        if file not in self._open:
            self._open[file] = os.open(self._directory / file, os.O_WRONLY)
        data = memoryview(values.view(-1).view(torch.uint8).numpy())
        _write_at(self._open[file], data, offset + first * dtype.itemsize)

    def close(self) -> None:
        """Make sure that everything is on the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._open.clear()


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + (1 << 30)], offset + done)


def with_head(shard: Shard) -> Shard:
    """The model with the embedding a second time, as the head: some directories of tied models store both."""
    embedding = "model.embed_tokens.weight"
    size = shard.params[embedding]
    head = whole(embedding, size, "lm_head.weight")
    return Shard({**shard.params, "lm_head.weight": size}, (*shard.pieces, head))


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config.json, tokenizer and the like; config.json then says `dtype`, unless None."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
    if dtype is None:
        return
    config = json.loads((target / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    stale = [key for key in ("torch_dtype", "dtype") if config.get(key, name) != name]
    if stale:
        config.update(dict.fromkeys(stale, name))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def replace_directory(partial: Path, path: Path) -> None:
    """Rename a complete directory to its final name, in place of what is there."""
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    if old.exists():
        shutil.rmtree(old)
