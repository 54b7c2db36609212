"""Write the page to hand in: what runs were, what differs, first and last values, pictures, a few samples."""

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spmd_rl.analysis.curves import WANTED, Run
from spmd_rl.analysis.legends import differences, distinct
from spmd_rl.analysis.panels import GIB
from spmd_rl.data.samples import SAMPLES, read_samples, thumbnails
from spmd_rl.runlog.launches import read_launches

LONGEST = 1200
"""Characters of a sample's prompt or response that the page shows."""
_SHOWN = ("correct", "wrong", "truncated", "unparsed")
_TABLE = (
    *((title, names, 1.0) for title, names in (*WANTED, ("KL to the reference", ("actor/kl_loss",)))),
    ("truncated", ("rollout/truncated_fraction",), 1.0),
    ("with a <think> block", ("response/think_fraction",), 1.0),
    ("groups all right", ("groups/all_correct_fraction",), 1.0),
    ("groups all wrong", ("groups/all_wrong_fraction",), 1.0),
    ("seconds a step", ("timing/all",), 1.0),
    ("tokens/s of a rank", ("e2e_tps",), 1.0),
    ("peak memory of a rank, GiB", ("memory/peak_bytes",), GIB),
)


def as_page(
    runs: Sequence[Run], pictures: Mapping[str, str], notes: Sequence[str], directories: Sequence[Path] = ()
) -> str:
    """Return a Markdown page, which holds the pictures that samples show: `with_files` takes them out.

    `pictures`: file -> caption, `directories`: of the runs, for launches and samples.
    """
    names = distinct([run.name for run in runs])
    lines = [f"# {', '.join(names)}", "", *_facts(runs, names, directories)]
    lines += [*_differences_table(runs, names), *_values_table(runs, names)]
    lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    for file, caption in pictures.items():
        # Markdown shows no PDF.
        lines += [f"## {caption}", "", f"{'' if file.endswith('.pdf') else '!'}[{caption}]({file})", ""]
    for name, directory in zip(names, directories, strict=False):
        lines += _samples(name if len(runs) > 1 else "", directory)
    return "\n".join(lines)


def with_files(page: str) -> tuple[str, dict[str, bytes]]:
    """Return a page that names files in place of the pictures which it holds, and these by their names.

    What shows Markdown seldom shows pictures that are inside it.
    """
    files: dict[str, bytes] = {}

    def named(found: re.Match[str]) -> str:
        content = base64.b64decode(found[1])
        name = f"shown_{hashlib.blake2b(content, digest_size=6).hexdigest()}.jpg"
        files[name] = content
        return f"![picture]({name})"

    return re.sub(r"!\[picture\]\(data:image/jpeg;base64,([\w+/=]+)\)", named, page), files


def _facts(runs: Sequence[Run], names: Sequence[str], directories: Sequence[Path]) -> Iterator[str]:
    table: dict[str, list[str]] = {}
    for position, run in enumerate(runs):
        for fact, value in _facts_of(run, directories[position] if directories else None).items():
            table.setdefault(fact, [""] * len(runs))[position] = value
    head = [""] * 2 if len(runs) == 1 else ["", *names]
    yield from _table(head, [[fact, *values] for fact, values in table.items()])


def _facts_of(run: Run, directory: Path | None) -> dict[str, str]:
    launches = read_launches(directory) if directory else []
    settings, steps = run.settings, max(int(row["step"] or 0) for row in run.rows)
    first, last = (next((row["time"] for row in rows if row.get("time")), None) for rows in (run.rows, run.rows[::-1]))
    found: dict[str, str] = {}
    if launches:
        found["begun"] = launches[0].time
    elif first:
        found["first evaluation or step"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(first))
    if last:
        found["last row"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(last))
    wanted = settings.get("train.steps")
    found["steps"] = f"{steps} of {wanted}" if wanted else str(steps)
    for fact, name in (("algorithm", "algorithm.advantage"), ("model", "model.path"), ("data", "data.source")):
        if settings.get(name) is not None:
            found[fact] = f"`{settings[name]}`"
    if settings.get("train.learning_rate") is not None:
        found["learning rate"] = f"{settings['train.learning_rate']:g}"
    if launches:
        newest = launches[-1]
        found["ranks"] = f"{newest.ranks}, rank 0 on {newest.host}"
        found["command"] = f"`{newest.command}`"
        found["commit"] = newest.commit or "no source tree"
        found["versions"] = ", ".join(f"{name} {number}" for name, number in newest.versions.items())
        if len(launches) > 1:
            resumed = ", ".join(str(launch.after_step) for launch in launches[1:])
            found["launches"] = f"{len(launches)}, resumed after step {resumed}"
    return found


def _differences_table(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    if len(runs) == 1:
        return
    yield "## What differs"
    yield ""
    differ = differences(runs)
    if differ:
        yield from _table(["setting", *names], [[f"`{n}`", *map(str, v)] for n, v in differ.items()])
    else:
        yield "All settings are the same."
        yield ""


def _values_table(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """First and last steps, each averaged over a tenth of the run: one step of few samples says little."""
    yield "## First and last values"
    yield ""
    evaluations = dict.fromkeys(name for run in runs for name in run.measured("eval/", "/accuracy"))
    wanted = [*_TABLE, *((f"held-out {name.split('/')[1]} accuracy", (name,), 1.0) for name in evaluations)]
    table = []
    for title, metrics, scale in wanted:
        cells = [_first_and_last(run, metrics, scale) for run in runs]
        if any(cell not in ("not measured", "0 → 0") for cell in cells):
            table.append([title, *cells])
    steps = [max(int(row["step"] or 0) for row in run.rows) for run in runs]
    yield from _table(["", *names], [["steps", *map(str, steps)], *table])
    yield "Values of steps are means over the first and the last tenth of the steps; ± is half an interval of 95 %."
    yield ""


def _first_and_last(run: Run, names: tuple[str, ...], scale: float) -> str:
    curve = run.curve(*names)
    if curve is None:
        return "not measured"
    part = 1 if names[0].startswith("eval/") else max(1, len(curve.values) // 10)
    means = [scale * sum(side) / part for side in (curve.values[:part], curve.values[-part:])]
    intervals = run.intervals.get(curve.title, {})
    sides = []
    for mean, step in zip(means, (curve.steps[0], curve.steps[-1]), strict=True):
        low, high = intervals.get(step, (0.0, 0.0))
        sides.append(f"{mean:.3g}" + (f" ± {(high - low) / 2:.2g}" if high > low else ""))
    return " → ".join(sides)


def _samples(name: str, directory: Path) -> Iterator[str]:
    """One sample of each cause, of the first and of the last step that wrote any."""
    if not any((directory / SAMPLES).glob("step_*.jsonl")):
        return
    first: dict[str, dict[str, object]] = {}
    last: dict[str, dict[str, object]] = {}
    pictures: dict[tuple[object, object], Sequence[str]] = {}
    step = begun = None
    for sample in read_samples(directory):
        begun = sample["step"] if begun is None else begun
        if sample["step"] != step:
            step, last = sample["step"], {}
            pictures = {key: some for key, some in pictures.items() if key[0] == begun}
        pictures |= thumbnails([sample])
        last.setdefault(str(sample.get("cause")), sample)
        if sample["step"] == begun:
            first = last
    yield f"## Samples{f' of {name}' if name else ''}"
    yield ""
    for found in (first, last) if first is not last else (first,):
        for cause in [cause for cause in _SHOWN if cause in found][:2] or list(found)[:2]:
            yield from _sample(found[cause])
            if some := pictures.get((found[cause]["step"], found[cause].get("index"))):
                yield from (" ".join(f"![picture]({one})" for one in some), "")


def _sample(sample: Mapping[str, object]) -> Iterator[str]:
    reward, answer = sample.get("reward"), sample.get("answer")
    told = f", reward {reward:g}" if isinstance(reward, float | int) else ""
    yield f"Step {sample['step']}, {sample.get('cause')}{told}" + (f", the answer is {answer}" if answer else "")
    text = f"{_short(sample.get('question') or sample.get('prompt') or '')}\n\n{_short(sample['response'])}"
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in ["", *re.findall("`+", text)]))
    yield from ("", f"{fence}text", text, fence, "")


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text)} characters)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
    yield ""
