"""Compare two runs bit for bit: metrics, samples, evaluations and final weights; no torch."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.data.samples import SAMPLES, samples_step
from spmd_rl.runlog.run_dir import CHECKPOINTS, EVALUATIONS, METRICS

# What a clock or a memory meter says is another time's, and so is how often ranks had to start again, and what was in
# their caches.
MEASURED = ("time", "timing/", "memory/", "bytes/", "e2e_tps", "update_tps", "vllm_tps", "rollout/response_tps")
MEASURED += ("rollout/imbalance_fraction", "restart/", "process/", "images/")
# What says how work was laid out, and not what came of it.
_LAYOUT = ("update/imbalance_fraction", "update/padding_fraction")
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}

_CRITIC = "hf_critic"

Everything = range(0, 1 << 62)


@dataclass
class Compared:
    """Numbers of things compared, and the first that differs, with both values; None: all was bit-identical."""

    difference: str | None = None
    parameters: int = 0
    samples: int = 0
    metrics: int = 0
    """Numbers in all rows."""
    answers: int = 0
    """Questions of evaluations, with what came back."""
    steps: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = [(self.parameters, "weights of {} parameters"), (self.samples, "{} samples")]
        parts += [(self.answers, "{} answers of evaluations"), (self.metrics, "{} metrics")]
        text = ", ".join(words.format(count) for count, words in parts if count)
        return text + (f" of steps {self.steps[0]} to {self.steps[1]}" if self.steps else "")


def first_difference(run_a: Path, run_b: Path) -> str | None:
    """File, step, name and both values of the first thing in which two runs' directories differ."""
    return compare(run_a, run_b).difference


def compare(run_a: Path, run_b: Path, steps: range = Everything) -> Compared:
    """Step by step: samples, metrics, evaluations; then the final weights.

    Of the rows of metrics that steps of `steps` wrote, all numbers but those that a clock or a memory meter gave. The
    weights are those of hf/, or those of the newest checkpoint where the runs exported none.
    """
    done = Compared()
    done.difference = next(_differences(Path(run_a), Path(run_b), steps, done), None)
    return done


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """A run's rows of metrics, without what is measured by a clock or a memory meter."""
    lines = (Path(run_dir) / METRICS).read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)} for line in lines
    ]


def largest_gap(run_a: Path, run_b: Path, steps: range = Everything, weights: bool = True) -> tuple[float, str]:
    """The largest relative difference of a metric or, with `weights`, a parameter, and which it is.

    Metrics of how work was laid out are left out. Of a metric |a - b| / max(|a|, |b|), where one is above 1e-6; of a
    parameter the norm of the difference by the norm of the parameter.
    """
    worst = (0.0, "nothing")
    ours, theirs = ({_key(row): row for row in rows(run)} for run in (run_a, run_b))
    for key in ours.keys() & theirs.keys():
        if key[0] not in steps:
            continue
        for name in (ours[key].keys() & theirs[key].keys()).difference(_LAYOUT):
            one, other = ours[key][name], theirs[key][name]
            size = max(abs(one or 0.0), abs(other or 0.0))
            if size > 1e-6:
                worst = max(worst, (abs((one or 0.0) - (other or 0.0)) / size, f"{name} of step {key[0]}"))
    here, there = (_parameters(Path(run)) if weights else {} for run in (run_a, run_b))
    for name in here.keys() & there.keys():
        one, other = here[name].values(), there[name].values()
        if one is not None and other is not None and one.shape == other.shape:
            norm = float(np.linalg.norm(one.astype(np.float64)))
            gap = float(np.linalg.norm(one.astype(np.float64) - other)) / max(norm, 1e-30)
            worst = max(worst, (gap, f"parameter {name}"))
    return worst


def _differences(run_a: Path, run_b: Path, steps: range, done: Compared) -> Iterator[str]:
    ours, theirs = (_by_step(rows(run), lambda row: int(row["step"])) for run in (run_a, run_b))
    files = {place: [_by_step(_files(run / place), samples_step) for run in (run_a, run_b)] for place in _LINES}
    seen = sorted(
        {step for found in (ours, theirs, *(each for both in files.values() for each in both)) for step in found}
    )
    for step in seen:
        if step not in steps:
            continue
        done.steps = (done.steps[0] if done.steps else step, step)
        yield from _line_differences(SAMPLES, step, files[SAMPLES], run_a, run_b, done)
        yield from _row_differences(step, ours.get(step, []), theirs.get(step, []), done)
        yield from _line_differences(EVALUATIONS, step, files[EVALUATIONS], run_a, run_b, done)
    yield from _weight_differences(run_a, run_b, done)


_LINES = (SAMPLES, EVALUATIONS)


def _by_step(entries: Iterable[Any], step_of: Callable[[Any], int]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for entry in entries:
        found.setdefault(step_of(entry), []).append(entry)
    return found


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*")) if directory.is_dir() else []


def _key(row: Mapping[str, Any]) -> tuple[int, bool]:
    return int(row["step"]), any(name.startswith("eval/") for name in row)


def _row_differences(step: int, ours: list[dict], theirs: list[dict], done: Compared) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"{METRICS}, step {step}: {len(ours)} rows in one run, {len(theirs)} in the other"
    for one, other in zip(ours, theirs, strict=False):
        for name in dict.fromkeys((*one, *other)):
            done.metrics += name != "step"
            if name not in one or name not in other or one[name] != other[name]:
                yield f"{METRICS}, step {step}: {name} is {_spelled(one, name)} and {_spelled(other, name)}"


def _line_differences(
    place: str, step: int, files: list[dict[int, list[str]]], run_a: Path, run_b: Path, done: Compared
) -> Iterator[str]:
    ours, theirs = (found.get(step, []) for found in files)
    if len({len(ours), len(theirs)}) > 1 and {len(ours), len(theirs)} & {0}:
        yield f"{place}, step {step}: one run has {ours or 'nothing'}, the other {theirs or 'nothing'}"
        return
    # By the ranks that made them, samples may stand in one file or in several.
    lines = [
        sorted((line for name in names for line in _read_lines(run / place / name)), key=_identity)
        for names, run in ((ours, run_a), (theirs, run_b))
    ]
    for one, other in zip(*lines, strict=False):
        done.samples += place == SAMPLES
        done.answers += place == EVALUATIONS
        for name in dict.fromkeys((*one, *other)):
            if one.get(name) != other.get(name):
                who = ", ".join(f"{key} {one[key]}" for key in ("id", "index") if key in one)
                yield (
                    f"{place}, step {step}, {ours[0]}: {name} of {who} is {_spelled(one, name)} and "
                    f"{_spelled(other, name)}"
                )
    if len(lines[0]) != len(lines[1]):
        yield f"{place}, step {step}: {len(lines[0])} lines in one run, {len(lines[1])} in the other"


def _identity(line: Mapping[str, Any]) -> tuple[int, int]:
    return int(line.get("id", 0)), int(line.get("index", 0))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _spelled(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not there"
    text = repr(values[name])
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class _Parameter:
    """A tensor of a safetensors file; its bytes are read when they are asked for."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def bytes(self) -> np.ndarray:
        if not self.length:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", self.offset, (self.length,))

    def values(self) -> np.ndarray | None:
        """As floating-point numbers, flat; None where numpy has none of the kind."""
        if self.dtype == "BF16":
            return (self.bytes().view("<u2").astype(np.uint32) << 16).view(np.float32)
        return self.bytes().view(_FLOATS[self.dtype]) if self.dtype in _FLOATS else None


def _parameters(run_dir: Path) -> dict[str, _Parameter]:
    """Of the exported model, and critic. The format: a length of 8 bytes, JSON of that length, the tensors."""
    found = {}
    for file in [*sorted((run_dir / "hf").glob("*.safetensors")), *sorted((run_dir / _CRITIC).glob("*.safetensors"))]:
        of = "" if file.parent.name == "hf" else f"{_CRITIC}: "
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[of + name] = _Parameter(
                    file, entry["dtype"], tuple(entry["shape"]), 8 + size + start, end - start
                )
    return found


def _weight_differences(run_a: Path, run_b: Path, done: Compared) -> Iterator[str]:
    ours, theirs = _parameters(run_a), _parameters(run_b)
    if not ours and not theirs:
        yield from _checkpoint_differences(run_a, run_b)
        return
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield f"hf: parameter {name} is in one run alone"
            continue
        done.parameters += 1
        one, other = ours[name], theirs[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"hf: parameter {name} is {one.dtype} {one.shape} and {other.dtype} {other.shape}"
        elif not np.array_equal(one.bytes(), other.bytes()):
            yield f"{one.file.parent.name}/{one.file.name}: parameter {name}{_where(one, other)}"


def _where(one: _Parameter, other: _Parameter) -> str:
    """The first element that differs, with both values."""
    ours, theirs = one.values(), other.values()
    if ours is None or theirs is None:
        return " has other bytes"
    width = ours.dtype.itemsize
    bits = f"<u{width}"
    flat = int(np.flatnonzero(ours.view(bits) != theirs.view(bits))[0])
    index = [int(i) for i in np.unravel_index(flat, one.shape)] if one.shape else []
    return f"{index} is {float(ours[flat])!r} and {float(theirs[flat])!r}"


def _checkpoint_differences(run_a: Path, run_b: Path) -> Iterator[str]:
    newest = [max((run / CHECKPOINTS).glob("step_*/files.json"), default=None) for run in (run_a, run_b)]
    if newest[0] is None or newest[1] is None:
        yield "neither hf/ nor checkpoints are there in both runs: no weights to compare"
        return
    ours, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in newest)
    if newest[0].parent.name != newest[1].parent.name:
        yield f"{CHECKPOINTS}: the newest are {newest[0].parent.name} and {newest[1].parent.name}"
    for name in dict.fromkeys((*ours, *theirs)):
        if name.endswith(".distcp") and ours.get(name) != theirs.get(name):
            yield f"{CHECKPOINTS}/{newest[0].parent.name}/{name}: other bytes ({ours.get(name)}, {theirs.get(name)})"
