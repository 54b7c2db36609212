"""Write a shard of every rank as one Hugging Face directory, streamed: no rank ever holds the model twice."""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.families.table import Sizes
from spmd_rl.weights.layout import NOTHING, Index, Shard, whole
from spmd_rl.weights.load import INDEX, SINGLE, check_headers, read_headers
from spmd_rl.weights.move import DTypes, Mover
from spmd_rl.weights.plan import plan

WRITER = 0  # the rank that writes
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
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
    bucket_elements: int = 1 << 24,
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
    names = [list(headers)]
    if len(shards) > 1:
        dist.broadcast_object_list(names, src=_global(WRITER, control or group), group=control or group)
    whole_model = hf_shard(shape)
    if shape.tied and "lm_head.weight" in names[0]:
        whole_model = _with_head(whole_model)
    destinations = [whole_model if r == WRITER else NOTHING for r in range(len(shards))]
    mover = Mover(plan(shards, destinations, rank, 0, bucket_elements), shards[rank], group, device, control)
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
    _copy_companions(source, partial, dtype or dtypes.of(next(iter(whole_model.params))))
    writer = _Files(partial, whole_model, dtypes, dtype, max_shard_bytes)
    mover.run(params, writer.write)
    writer.close()
    _replace(partial, path)


def check_target(path: Path, source: Path) -> None:
    """Raise ValueError when the directory must not be written to: it is the source, or holds no model."""
    if path.exists() and path.samefile(source):
        raise ValueError(f"export to {path}: that is model.path itself; write to another directory")
    if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
        raise ValueError(f"export to {path}: it exists and is no model directory; write to another one, or remove it")


class _Files:
    """Safetensors files whose headers are written first and whose tensors follow in any order."""

    def __init__(
        self, directory: Path, shard: Shard, dtypes: DTypes, dtype: torch.dtype | None, max_shard_bytes: int
    ) -> None:
        self._dtype = {name: dtype or dtypes.of(shard.by_param[name][0].tensor) for name in shard.params}
        bytes_of = {name: math.prod(size) * self._dtype[name].itemsize for name, size in shard.params.items()}
        groups: list[list[str]] = [[]]
        for name in shard.params:
            if groups[-1] and sum(bytes_of[n] for n in groups[-1]) + bytes_of[name] > max_shard_bytes:
                groups.append([])
            groups[-1].append(name)
        self._place: dict[str, tuple[int, int]] = {}  # file descriptor, offset
        self._left = set(shard.params)
        weight_map = {}
        for n, names in enumerate(groups, 1):
            file = SINGLE if len(groups) == 1 else f"model-{n:05d}-of-{len(groups):05d}.safetensors"
            weight_map.update(dict.fromkeys(names, file))
            self._begin(directory / file, names, shard.params, bytes_of)
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(bytes_of.values())}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _begin(self, file: Path, names: list[str], shapes: Mapping[str, Index], bytes_of: Mapping[str, int]) -> None:
        # Wide elements first, so that each tensor is aligned to its element size. Format: 8 bytes length of the header,
        # the header padded with spaces to 8 bytes, the tensors without gaps
        # (https://github.com/huggingface/safetensors#format).
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in sorted(names, key=lambda name: -self._dtype[name].itemsize):
            size = bytes_of[name]
            header[name] = {
                "dtype": _NAMES[self._dtype[name]],
                "shape": list(shapes[name]),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _write_at(descriptor, len(text).to_bytes(8, "little") + text, 0)
        for name in names:
            self._place[name] = descriptor, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put one complete tensor where it belongs."""
        values = tensor.to(device="cpu", dtype=self._dtype[name]).contiguous()
        _write_at(self._place[name][0], memoryview(values.view(-1).view(torch.uint8).numpy()), self._place[name][1])
        self._left.remove(name)

    def close(self) -> None:
        """Make sure that everything is on the disk."""
        assert not self._left, f"never written: {sorted(self._left)}"
        for descriptor in {descriptor for descriptor, _ in self._place.values()}:
            os.fsync(descriptor)
            os.close(descriptor)


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + (1 << 30)], offset + done)


def _with_head(shard: Shard) -> Shard:
    """The model with the embedding a second time, as the head: some directories of tied models store both."""
    embedding = "model.embed_tokens.weight"
    size = shard.params[embedding]
    head = whole(embedding, size, "lm_head.weight")
    return Shard({**shard.params, "lm_head.weight": size}, (*shard.pieces, head))


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    stale = [key for key in ("torch_dtype", "dtype") if config.get(key, name) != name]
    if stale:
        config.update(dict.fromkeys(stale, name))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _replace(partial: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    if old.exists():
        shutil.rmtree(old)


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank
