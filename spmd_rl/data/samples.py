"""Samples as they are kept for people to read: lines of runs/<name>/samples/step_*.jsonl."""

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.data.tickets import SampleReward

SAMPLES = "samples"
"""The directory inside a run's."""
SKIPPED = "skipped"
"""The same, of samples that updates were skipped for."""

_STEP = re.compile(r"step_(\d+)")


def sample_record(scored: SampleReward, row: Mapping[str, Any], **kept: Any) -> dict[str, Any]:
    """Make a line: what a sample earned, its prompt's columns, and what else is `kept` (step, question, response, ...).

    Columns that JSON cannot hold (images, bytes, NaN) are left out.
    """
    line = {"id": scored.id} | kept
    line |= {"reward": scored.reward, "cause": scored.cause, "scores": scored.scores}
    if scored.extracted is not None:
        line["extracted"] = scored.extracted
    return line | {"row": _spelled(row)}


def _spelled(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in row.items():
        try:
            found[name] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            continue
    return found


def _plain(value: Any) -> Any:
    """numpy's values, which columns of parquet files are made of."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def samples_file(step: int, rank: int | None = None) -> str:
    """Name of the file of a step's samples: of all that are kept, or of one rank's where every rank writes its own."""
    return f"step_{step:06d}.jsonl" if rank is None else f"step_{step:06d}_rank_{rank:05d}.jsonl"


def samples_step(name: str) -> int:
    """The step in such a name; -1 for any other name."""
    found = _STEP.match(name)
    return int(found[1]) if found else -1


def write_samples(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half of a surrogate pair is text that UTF-8 refuses; its escape is JSON that says the same.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(dict(line), ensure_ascii=False) + "\n" for line in lines)


def read_samples(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The samples a run has written so far, step by step; each has its `step`, which older lines lack.

    Raises ValueError when there are none, or when a line is not what a run writes.
    """
    files = sorted((run_dir / SAMPLES).glob("step_*.jsonl"))
    if not files:
        raise ValueError(
            f"{run_dir / SAMPLES} has no step_*.jsonl: name the directory of a run that wrote samples, "
            "which run.samples_logged = 8, or -1 for all, makes it do"
        )
    for path in files:
        named = _STEP.match(path.name)
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break  # being written just now
                yield {"step": int(named[1]) if named else 0} | _parsed(line, path, number)


def thumbnails(samples: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], Sequence[str]]:
    """Return small pictures by step and index of a prompt's row: they stand in the first of its samples alone."""
    return {(one.get("step"), one.get("index")): one["thumbnails"] for one in samples if one.get("thumbnails")}


def as_html(pictures: Iterable[str]) -> str:
    """Return small pictures, each an address that pages show, in one line of a page."""
    return "".join(f'<img src="{html.escape(one)}" alt="">' for one in pictures)


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        sample = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: {error}; a sample is one JSON object a line") from error
    if not isinstance(sample, dict) or not isinstance(sample.get("response"), str):
        raise ValueError(f"{path}, line {number}: no object with a response; a run's samples have one")
    return sample
