"""Hugging Face directories into Megatron checkpoints and back, slice by slice: no process ever holds the model.

Both ways write a directory beside its final name and go on where an earlier run was interrupted. With torch.distributed
running, all processes call the same function and share the work.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape, read_model_shape, with_value_head
from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.files.checkpoint_job import Job, Unit, fingerprint, rank_and_size
from spmd_rl.weights.files.checkpoint_layout import checkpoint_shard, extra_states, pieces_in, rank_chunks
from spmd_rl.weights.files.checkpoint_reader import METADATA, CheckpointSource, Stored
from spmd_rl.weights.files.checkpoint_writer import write_chunks, write_index
from spmd_rl.weights.files.hf_extras import copy_companions, read_files, remember_files, say_value_head
from spmd_rl.weights.files.hf_reader import SCORE, HfSource
from spmd_rl.weights.files.safetensors_files import SafetensorsFiles, group_tensors
from spmd_rl.weights.files.weight_source import Source, first_difference
from spmd_rl.weights.transfer.boxes import Box, Index, Shard, split, view

HF = "hf"  # in a checkpoint: the model's config.json, tokenizer and so on
_HF = "--hf"  # the option that names a Hugging Face directory
_VERSION = 1
_HEAD = "lm_head.weight"
# Megatron has it in float32 whatever the rest is in, so a change of dtype leaves it alone.
_KEPT = ".mlp.gate.e_score_correction_bias"


class DifferenceError(Exception):
    """Says where what was written isn't what was read."""


@dataclass(frozen=True)
class Limits:
    """Bounds of memory and of the size of files, in bytes."""

    slice: int = 64 << 20
    """Of a tensor in memory; chunks of a checkpoint are no larger."""
    unit: int = 1 << 30
    """Of a checkpoint's files, and of what an interrupted run may have to do again."""
    hf_file: int = 5_000_000_000
    """Of safetensors files, where the checkpoint doesn't know how they were."""


@dataclass(frozen=True)
class Progress:
    """Listeners to how far this process is, in bytes."""

    started: Callable[[str, int, int], None] = lambda what, done, total: None
    """Something begins ("written", "compared"): how much of it was done earlier, and all of it."""
    advanced: Callable[[int], None] = lambda more: None


def to_megatron(
    hf: str | Path,
    output: str | Path,
    layout: TrainLayout,
    *,
    dtype: torch.dtype | None = None,
    labels: int = 0,
    force: bool = False,
    verify: bool = False,
    progress: Progress = Progress(),
    limits: Limits = Limits(),
) -> None:
    """Write a Hugging Face directory as a checkpoint whose chunks and files suit a training layout.

    Any other layout can read it. `dtype` None: as in the directory. `labels`: of a language model's directory make a
    sequence-classification model with a score head of so many rows, all zero; 0: leave the head as it is. `force`:
    replace what is at `output`, when the new one is complete. `verify`: read everything again and compare it before the
    directory gets its name. Raises ValueError (bad input, an output in the way, a full disk) and DifferenceError.
    """
    hf, output = Path(hf), Path(output)
    shape, source = open_hf(hf, labels)
    if shape.experts is None and layout.expert * layout.expert_tensor > 1:
        knob = "expert" if layout.expert > 1 else "expert_tensor"
        raise ValueError(f"parallel.{knob} = {getattr(layout, knob)}: a {shape.family} model has no experts; use 1")
    whole = checkpoint_shard(shape)
    dtypes = _key_dtypes(source, whole, dtype)
    files = _chunk_files(rank_chunks(shape, layout, whole, _most(dtypes, limits)), dtypes, limits.unit)
    plan = {
        "version": _VERSION,
        "source": fingerprint([hf / "config.json", *{header.file for header in source.headers.values()}]),
        "options": [str(dtype), labels, dataclasses.asdict(layout), dataclasses.asdict(limits)],
    }
    job = Job(output, plan, [hf], force)

    def fill(chunk: Box, values: torch.Tensor) -> None:
        for box, at in pieces_in(chunk, whole.by_param[chunk.tensor]):
            source.copy(box, view(values, at, box.shape))

    def write(file: str) -> list[Stored]:
        return write_chunks(job.partial / file, files[file], dtypes, fill, progress.advanced)

    units = [Unit(file, sum(_bytes(chunk, dtypes) for chunk in chunks), write) for file, chunks in files.items()]
    progress.started("written", *job.done(units))
    notes = job.run(units, lambda: (job.partial / HF).mkdir())
    if job.rank == 0:
        stored = [Stored(Box(*chunk), *where) for items in notes.values() for chunk, *where in items]
        write_index(job.partial, whole.params, dtypes, stored, extra_states(whole, shape))
        copy_companions(hf, job.partial / HF, dtype)
        if labels:
            say_value_head(job.partial / HF, shape)
        else:
            remember_files(source, job.partial / HF, shape)
    if verify:
        job.barrier()
        _verify(job, source, CheckpointSource(job.partial, shape), hf_shard(shape).params, progress, limits)
    job.finish()


def to_hf(
    checkpoint: str | Path,
    output: str | Path,
    *,
    hf: str | Path | None = None,
    dtype: torch.dtype | None = None,
    force: bool = False,
    verify: bool = False,
    progress: Progress = Progress(),
    limits: Limits = Limits(),
) -> None:
    """Write a checkpoint as a Hugging Face directory, in the files it came from, where the checkpoint knows them.

    `hf`: a directory with the model's config.json, tokenizer and so on; None: the checkpoint's own. The rest is as in
    `to_megatron`.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    companions = Path(hf) if hf is not None else checkpoint / HF
    shape, source = open_checkpoint(checkpoint, companions)
    known = read_files(companions)
    tied_head = shape.tied and known is not None and any(_HEAD in names for names in known["files"].values())
    tensors = hf_shard(shape, tied_head)
    groups = None
    if known and sorted(name for names in known["files"].values() for name in names) == sorted(tensors.params):
        groups = known["files"]
    dtypes = {name: _new_dtype(name, source.dtype(name), dtype) for name in tensors.params}
    bytes_of = {name: math.prod(size) * dtypes[name].itemsize for name, size in tensors.params.items()}
    index = known["index"] if known and groups and dtype is None else None
    groups = groups or group_tensors(bytes_of, limits.hf_file)
    plan = {
        "version": _VERSION,
        "source": fingerprint([companions / "config.json", checkpoint / METADATA, *checkpoint.glob("*.distcp")]),
        "options": [str(dtype), dataclasses.asdict(limits)],
    }
    job = Job(output, plan, [checkpoint, companions], force)
    files = SafetensorsFiles(job.partial, groups, tensors.params, dtypes, known["names"] if known else {})
    runs = {f"{n:06d}": names for n, names in enumerate(_runs(groups, bytes_of, limits.unit))}

    def prepare() -> None:
        files.create(index)
        copy_companions(companions, job.partial, dtype)

    def write(run: str) -> None:
        for name in runs[run]:
            size = tensors.params[name]
            for box in split(Box(name, (0,) * len(size), size), _most(dtypes, limits)):
                values = torch.empty(box.shape, dtype=dtypes[name])
                source.copy(box, values)
                files.write(box, values)
                progress.advanced(values.nbytes)
        files.close()

    units = [Unit(run, sum(bytes_of[name] for name in names), write) for run, names in runs.items()]
    progress.started("written", *job.done(units))
    job.run(units, prepare)
    if verify:
        _verify(job, source, HfSource(job.partial, shape), hf_shard(shape).params, progress, limits)
    job.finish()


def compare(
    hf: str | Path, checkpoint: str | Path, *, progress: Progress = Progress(), limits: Limits = Limits()
) -> str | None:
    """Return the first difference between a directory and a checkpoint of it, in its dtypes; None: none."""
    checkpoint = Path(checkpoint)
    shape, there = open_checkpoint(checkpoint, checkpoint / HF if (checkpoint / HF).is_dir() else Path(hf))
    given = read_model_shape(hf, _HF)
    mine, here = open_hf(Path(hf), shape.labels if shape.head == "value" and given.head == "lm" else 0)
    sizes, others = hf_shard(mine).params, hf_shard(shape).params
    for name in (*sizes, *others):
        if sizes.get(name) != others.get(name):
            a, b = (held.get(name, "missing") for held in (sizes, others))
            return f"{name} is {a} in the source and {b} in what was written: {mine.family} and {shape.family}"
    return _first_difference(here, there, sizes, progress, limits)


def open_hf(hf: Path, labels: int = 0) -> tuple[ModelShape, HfSource]:
    """Open a directory, as the model it is, or with a score head of so many zero rows in place of its head."""
    shape = read_model_shape(hf, _HF)
    if not labels:
        return shape, HfSource(hf, shape, knob=_HF)
    if shape.head == "value":
        met = f"a {shape.architecture} has a score head already"
        raise ConfigError(Problem(_HF, hf, met, "leave its head as it is"))
    valued = with_value_head(shape, labels)
    if valued is None:
        met = f"{shape.family} models are not supported with a score head"
        raise ConfigError(Problem(_HF, hf, met, "leave its head as it is"))
    return valued, HfSource(hf, shape, zeros=(SCORE,), knob=_HF)


def open_checkpoint(checkpoint: Path, companions: Path) -> tuple[ModelShape, CheckpointSource]:
    """Open a checkpoint, as the model that a directory with its config.json describes."""
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such directory")
    if not (companions / "config.json").is_file():
        raise ValueError(f"{companions}: there is no config.json; name a directory that has the model's (hf-config)")
    shape = read_model_shape(companions, "--hf-config")
    return shape, CheckpointSource(checkpoint, shape)


def _verify(
    job: Job, source: Source, written: Source, sizes: Mapping[str, Index], progress: Progress, limits: Limits
) -> None:
    if difference := _first_difference(source, written, sizes, progress, limits):
        job.discard()
        raise DifferenceError(difference)


def _first_difference(
    a: Source, b: Source, sizes: Mapping[str, Index], progress: Progress, limits: Limits
) -> str | None:
    """In the dtypes of `b`; the processes share the work, and all hear of what one finds."""
    rank, processes = rank_and_size()
    names = list(sizes)[rank::processes]
    dtypes = {name: b.dtype(name) for name in names}
    boxes = [Box(name, (0,) * len(sizes[name]), sizes[name]) for name in names]
    progress.started("compared", 0, sum(_bytes(box, dtypes) for box in boxes))
    found = first_difference(a, b, boxes, dtypes, limits.slice // 8, progress.advanced)
    return next((difference for difference in gather(found) if difference), None)


def _key_dtypes(source: Source, whole: Shard, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    first: dict[str, str] = {}
    for piece in whole.pieces:
        own = _new_dtype(piece.tensor, source.dtype(piece.tensor), dtype)
        if dtypes.setdefault(piece.param, own) != own:
            raise ValueError(
                f"{first[piece.param]} is {dtypes[piece.param]} and {piece.tensor} is {own}; Megatron has them in one "
                f"tensor, {piece.param}: convert with a dtype"
            )
        first.setdefault(piece.param, piece.tensor)
    return dtypes


def _new_dtype(tensor: str, old: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return old if dtype is None or tensor.endswith(_KEPT) else dtype


def _bytes(box: Box, dtypes: Mapping[str, torch.dtype]) -> int:
    return box.elements * dtypes[box.tensor].itemsize


def _most(dtypes: Mapping[str, torch.dtype], limits: Limits) -> int:
    return max(1, limits.slice // max(dtype.itemsize for dtype in dtypes.values()))


def _chunk_files(
    chunks: Sequence[Sequence[Box]], dtypes: Mapping[str, torch.dtype], most_bytes: int
) -> dict[str, list[Box]]:
    """Files of each rank's chunks, named as torch names them: __{rank}_{number}.distcp."""
    files: dict[str, list[Box]] = {}
    for rank, boxes in enumerate(chunks):
        for number, run in enumerate(_pack(boxes, lambda box: _bytes(box, dtypes), most_bytes)):
            files[f"__{rank}_{number}.distcp"] = run
    return files


def _runs(files: Mapping[str, Sequence[str]], bytes_of: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    return [run for names in files.values() for run in _pack(names, bytes_of.__getitem__, most_bytes)]


def _pack(items: Sequence[Any], size: Callable[[Any], int], most: int) -> list[list[Any]]:
    """Neighbours together, as many as have the size, at least one."""
    runs: list[list[Any]] = []
    used = 0
    for item in items:
        if not runs or used + size(item) > most:
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += size(item)
    return runs
