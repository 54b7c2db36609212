"""Show and keep an evaluation."""

import html
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmd_rl.config.check_serving import SUMMARY
from spmd_rl.data.samples import as_html, write_samples
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.evaluation.benchmark import Comparison, Line, accuracy_interval, measure

SHOWN_EVERY_SECONDS = 10.0
_PAGE = """<!doctype html>
<meta charset="utf-8"><title>{name}</title>
<style>body {{ font: 14px sans-serif }} td {{ vertical-align: top; padding: 4px 12px; white-space: pre-wrap;
max-width: 40em }}</style>
<h1>{name}: {count} questions, the wrong ones first</h1>
<table><tr><th><th>question<th>answer<th>first response<th>accuracy</tr>
{rows}</table>
"""


class OnProgress(Protocol):
    """Called with how many of rank 0's samples are made."""

    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def progress(what: str, engines: int) -> Iterator[OnProgress]:
    """A bar on a terminal, else a line every ten seconds: how far rank 0's engine is, with its share of the samples."""
    share = f"{what}, samples" + (f" of this engine, one of {engines}" if engines > 1 else "")
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=20))
        with Progress(*columns, TimeRemainingColumn(compact=True), TextColumn("left"), transient=True) as bar:
            task = bar.add_task(share, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= SHOWN_EVERY_SECONDS:
            shown = time.monotonic()
            print(f"{share}: {done}/{total}", file=sys.stderr, flush=True)

    yield show


def result_text(name: str, lines: Sequence[Line], seconds: float, waited_seconds: float) -> str:
    """Describe a benchmark's result for people."""
    metrics, (low, high) = measure(lines), accuracy_interval(lines)
    n = len(lines[0]["samples"])
    tokens = sum(sample["response_tokens"] for line in lines for sample in line["samples"])
    rows = [
        ("accuracy", f"{metrics['accuracy']:.3f}  (95 %: {low:.3f} to {high:.3f}, {_interval(n)})"),
        *((_at(name), f"{value:.3f}") for name, value in metrics.items() if "_at_" in name),
        ("response length", f"{metrics['response_length_mean']:.1f} tokens"),
        ("truncated", f"{metrics['truncated_fraction']:.1%}"),
        ("unparsed", f"{metrics['unparsed_fraction']:.1%}"),
    ]
    if n > 1 and "majority_at_1" not in metrics:
        rows.append(("majority@k", "not known: the grader does not say which answer it read"))
    speed = f"{tokens / seconds:.0f} response tokens/s"
    rows.append(("time", f"{seconds:.1f} s, {speed}, reward workers {waited_seconds:.1f} s after the last"))
    width = max(len(name) for name, _ in rows)
    count = f"{len(lines)} questions" + (f" x {n} samples" if n > 1 else "")
    return "\n".join([f"{name}: {count}", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _interval(n: int) -> str:
    return "Wilson" if n == 1 else "over questions"


def _at(name: str) -> str:
    kind, _, k = name.partition("_at_")
    return f"{kind}@{k}"


def comparison_text(against: str, comparison: Comparison, changed: Path) -> str:
    """A model against a baseline, for people."""
    wins, losses = len(comparison.wins), len(comparison.losses)
    change = comparison.accuracy - comparison.baseline_accuracy
    return "\n".join(
        [
            f"against {against}: {comparison.baseline_accuracy:.3f} -> {comparison.accuracy:.3f}  "
            f"({change * 100:+.1f} points)",
            f"  won {wins}, lost {losses}, tied {comparison.ties}; McNemar's exact test: p = {comparison.p:.3g}",
            f"  changed questions  {changed}",
        ]
    )


def comparison_numbers(comparison: Comparison) -> dict[str, float]:
    """The same for summary.json."""
    return {
        "baseline_accuracy": comparison.baseline_accuracy,
        "accuracy": comparison.accuracy,
        "wins": len(comparison.wins),
        "losses": len(comparison.losses),
        "ties": comparison.ties,
        "mcnemar_p": comparison.p,
    }


def write_lines(directory: Path, name: str, lines: Sequence[Mapping[str, object]]) -> Path:
    """One JSON object a question."""
    path = directory / f"{name}.jsonl"
    write_samples(path, lines)
    return path


def write_page(directory: Path, name: str, lines: Sequence[Line]) -> Path | None:
    """Write a page of the questions beside their pictures, the wrong ones first; None where none shows a picture."""
    if not any("thumbnails" in line for line in lines):
        return None
    rows = "".join(map(_page_row, sorted(lines, key=lambda line: line["accuracy"])))
    path = directory / f"{name}.html"
    path.write_text(_PAGE.format(name=html.escape(name), count=len(lines), rows=rows), encoding="utf-8")
    return path


def _page_row(line: Line) -> str:
    pictures = as_html(line.get("thumbnails", ()))
    said = line["samples"][0]["response"]
    cells = [line["question"], line["answer"], said, f"{line['accuracy']:.2f}"]
    return f"<tr><td>{pictures}</td>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>\n"


def write_summary(directory: Path, summary: Mapping[str, object]) -> None:
    """Write the file by which the directory is known as an evaluation."""
    (directory / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_lines(directory: Path, name: str) -> list[Line]:
    """The questions of an earlier evaluation. Raises ValueError: it has none of this benchmark, or they are broken."""
    path = directory / f"{name}.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            assert {"index", "question", "answer", "accuracy", "samples"} <= line.keys()
    except FileNotFoundError as error:
        there = sorted(file.stem for file in directory.glob("*.jsonl") if not file.stem.startswith("changed_"))
        way = f"it evaluated {', '.join(there) or 'nothing'}"
        raise ConfigError(Problem("baseline", directory, f"it has no {path.name}", way)) from error
    except (OSError, ValueError, AssertionError, AttributeError) as error:
        met = f"{path.name} is not what an evaluation writes ({error})"
        raise ConfigError(Problem("baseline", directory, met, "name another")) from error
    return lines
