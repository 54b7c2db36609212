"""Write a shard of every rank as one Hugging Face directory, streamed: no rank ever holds the model twice."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.files.checkpoint_job import replace_directory
from spmd_rl.weights.files.hf_extras import copy_companions, say_value_head
from spmd_rl.weights.files.hf_reader import check_headers, read_headers
from spmd_rl.weights.files.safetensors_files import SafetensorsFiles, group_tensors
from spmd_rl.weights.transfer.boxes import NOTHING, Box, Shard
from spmd_rl.weights.transfer.transfer_schedule import BUCKET_ELEMENTS, Schedule
from spmd_rl.weights.transfer.weight_transfer import WeightTransfer

WRITER = 0  # the rank that writes


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export."""

    dtype: torch.dtype | None = None
    """None: as in the shards."""
    file_bytes: int = 5_000_000_000
    """A larger model is written as several files of at most so many, with an index."""
    bucket_elements: int = BUCKET_ELEMENTS
    """Of what the writer receives at once."""


def export_hf(
    path: str | Path,
    source: str | Path,
    shape: ModelShape,
    shards: Sequence[Shard],
    params: Mapping[str, torch.Tensor],
    rank: int = 0,
    control: dist.ProcessGroup | None = None,
    settings: ExportSettings = ExportSettings(),
    stored: ModelShape | None = None,
) -> None:
    """Write the directory `path`, all ranks together: the weights in `params`, everything else from `source`.

    `stored`: the shape of the model in `source`, where that has no score head and `shape` has.

    `shards`: every rank's source shard; `params`: this rank's. `control`: a group for small things that the ranks tell
    each other. The directory has the tensors that `source` has (but no rotary tables). One that is there already is
    replaced, and only when the new one is complete. Rank 0 writes, and holds a bucket or one tensor at a time; `path`
    exists when rank 0 returns. Raises ValueError: `path` is `source`, or something else than a model directory.
    """
    path, source = Path(path), Path(source)
    headers = read_headers(source) if rank == WRITER else {}
    names = gather(list(headers), control)[WRITER]
    model = hf_shard(shape, tied_head=shape.tied and "lm_head.weight" in names)
    destinations = [model if r == WRITER else NOTHING for r in range(len(shards))]
    plan = Schedule(shards, destinations, 0, settings.bucket_elements).plan(rank)
    transfer = WeightTransfer(plan, shards[rank], control=control)
    dtypes = transfer.dtypes(params)
    if rank != WRITER:
        transfer.run(params, {})
        return

    check_headers(source, headers, stored or shape)
    check_target(path, source)
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    dtype_of = {name: settings.dtype or dtypes.of(model.by_param[name][0].tensor) for name in model.params}
    copy_companions(source, partial, next(iter(dtype_of.values())))
    if stored is not None:
        say_value_head(partial, shape)
    bytes_of = {name: math.prod(size) * dtype_of[name].itemsize for name, size in model.params.items()}
    files = SafetensorsFiles(
        partial,
        group_tensors(bytes_of, settings.file_bytes),
        model.params,
        dtype_of,
        {name: header.name for name, header in headers.items()},
    )
    files.create()
    left = set(model.params)

    def write(name: str, tensor: torch.Tensor) -> None:
        files.write(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        left.remove(name)

    transfer.run(params, write)
    files.close()
    assert not left, f"never written: {sorted(left)}"
    replace_directory(partial, path)


def check_target(path: Path, source: Path) -> None:
    """Raise ValueError when the directory must not be written to: it is the source, or holds no model."""
    if path.exists() and path.samefile(source):
        raise ValueError(f"export to {path}: that is model.path itself; write to another directory")
    if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
        raise ValueError(f"export to {path}: it exists and is no model directory; write to another one, or remove it")
