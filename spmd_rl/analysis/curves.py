"""Runs as a person looks at them: curves from metrics.jsonl, what differs between settings, a page to hand in."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.config.loading import read_settings
from spmd_rl.config.names import REWARDS, Phase
from spmd_rl.runlog.run_dir import METRICS

TRAINING_ACCURACY = "reward/cause/correct"
CAUSE = "reward/cause/"
CORRECTED = "samples/corrected_fraction"
"""Not in metrics.jsonl: the fraction of a step's written samples that correct themselves."""

WANTED = (
    ("reward", REWARDS),
    ("accuracy while training", (TRAINING_ACCURACY,)),
    ("response length, tokens", ("response_length/mean",)),
    ("entropy", ("actor/entropy",)),
)
# Phases never overlap; `timing/rule_reward` and the like, which are hidden behind others, are none.
PHASES = (
    ("rollout", (Phase.ROLLOUT,)),
    ("update", (Phase.UPDATE, Phase.CRITIC_UPDATE)),
    ("log-probabilities before", (Phase.POLICY_LOGPROBS,)),
    ("reference", (Phase.REFERENCE_LOGPROBS,)),
    ("critic", (Phase.CRITIC_VALUES,)),
    ("waiting for graders", ("non_overlap_rule_reward",)),
    ("refresh and switching", (Phase.TO_ROLLOUT, Phase.TO_TRAINING)),
)
OTHER = "other"


@dataclass(frozen=True)
class Curve:
    """One metric over the steps it was measured at."""

    title: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """Metrics and settings of a run."""

    name: str
    rows: list[dict[str, float | None]]
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted name -> value."""

    def curve(self, *names: str, title: str = "") -> Curve | None:
        """The first of these metrics that was measured."""
        for name in names:
            points = [(int(row["step"]), value) for row in self.rows if (value := row.get(name)) is not None]  # type: ignore[arg-type]
            if points:
                steps, values = zip(*points, strict=True)
                return Curve(title or name, steps, values)
        return None

    def measured(self, prefix: str, suffix: str = "") -> list[str]:
        """Names of its metrics, in the order in which they first appear."""
        names = (name for row in self.rows for name, value in row.items() if value is not None)
        return [name for name in dict.fromkeys(names) if name.startswith(prefix) and name.endswith(suffix)]


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    """The rows of a run, finished or still going on. Raises ValueError when there are none."""
    path = run_dir / METRICS
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the directory of a run, such as runs/grpo")
    # A line without its end is one that is being written just now.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; a run writes one JSON object a line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: no object with a step; a run writes one JSON object a line")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows yet")
    return rows


def read_run(run_dir: Path) -> Run:
    """Metrics and settings of a run, finished or still going on. Raises ValueError when there are no metrics."""
    rows = read_rows(run_dir)
    config = run_dir / "config.yaml"
    return Run(run_dir.resolve().name, rows, read_settings(config) if config.exists() else {})


def curves(rows: Sequence[dict[str, float | None]]) -> list[Curve]:
    """Reward, accuracy, length, entropy, and the accuracy of each evaluation; what was not measured is left out."""
    run = Run("", list(rows))
    held_out = [(f"held-out {name.split('/')[1]} accuracy", (name,)) for name in run.measured("eval/", "/accuracy")]
    wanted = (run.curve(*names, title=title) for title, names in (*WANTED, *held_out))
    return [curve for curve in wanted if curve]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs -> their value in each; without names and places of the runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ("run.name", "run.dir"))
    found = {name: [run.settings.get(name, "not set") for run in runs] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def labels(runs: Sequence[Run], most: int = 3) -> list[str]:
    """A legend: each run's name and what its settings have that the others' have not, `most` of it."""
    differ = {
        name: values
        for name, values in differences(runs).items()
        if not name.startswith("run.") or name in ("run.seed", "run.platform")
    }
    last = [name.rsplit(".", 1)[-1] for name in differ]
    short = {
        name: end if last.count(end) == 1 else ".".join(name.split(".")[-2:])
        for name, end in zip(differ, last, strict=True)
    }
    found = []
    for position, run in enumerate(runs):
        parts = [f"{short[name]}={_brief(values[position])}" for name, values in list(differ.items())[:most]]
        more = [f"and {len(differ) - most} more"] if len(differ) > most else []
        found.append(f"{run.name}: {', '.join(parts + more)}" if parts else run.name)
    # Two directories of one name with the same settings are still two runs.
    return [f"{label} ({n})" if found.count(label) > 1 else label for n, label in enumerate(found, 1)]


def _brief(value: Any, most: int = 30) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def phase_seconds(run: Run) -> dict[str, list[float]]:
    """Phase -> seconds in each of the steps that were timed, the rest of the step as "other"; they add up to it."""
    timed = [row for row in run.rows if row.get("timing/all") is not None]
    found = {
        phase: [sum(row.get(f"timing/{name}") or 0.0 for name in names) for row in timed] for phase, names in PHASES
    }
    spent = [sum(seconds) for seconds in zip(*found.values(), strict=True)]
    found[OTHER] = [max(0.0, (row["timing/all"] or 0.0) - known) for row, known in zip(timed, spent, strict=True)]
    return found


def smoothing_window(points: int) -> int:
    """Over how many steps a curve's smoothed line averages: a tenth of them, an odd number; 1: too few to smooth."""
    return 1 if points < 8 else max(3, points // 10 | 1)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` steps around each; at the ends, over those of them that there are."""
    half = window // 2
    parts = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def as_text(found: Sequence[Curve], width: int, height: int = 12) -> str:
    """Plots for a terminal without colours, one below the other."""
    import plotext

    plots = []
    for curve in found:
        figure = plotext.figure.clear()
        figure.plot_size(width, height)
        figure.title(f"{curve.title}: {curve.values[0]:.3g} -> {curve.values[-1]:.3g}")
        figure.label("step", "x")
        signal = figure.signal(list(curve.steps), list(curve.values), marker="braille")
        figure.draw(signal.lines())
        plots.append(plotext.uncolorize(str(figure.build())))
    return "\n".join(plots)


def as_page(runs: Sequence[Run], pictures: Mapping[str, str], notes: Sequence[str]) -> str:
    """A Markdown page: what differs, first and last values, the pictures (file -> caption), and notes."""
    title = ", ".join(run.name for run in runs)
    lines = [f"# {title}", "", *_differences_table(runs), *_values_table(runs)]
    lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    for file, caption in pictures.items():
        lines += [f"## {caption}", "", f"![{caption}]({file})", ""]
    return "\n".join(lines)


def _differences_table(runs: Sequence[Run]) -> Iterator[str]:
    if len(runs) == 1:
        return
    yield "## What differs"
    yield ""
    differ = differences(runs)
    if differ:
        yield from _table(
            ["setting", *(run.name for run in runs)], [[f"`{n}`", *map(str, v)] for n, v in differ.items()]
        )
    else:
        yield "All settings are the same."
        yield ""


def _values_table(runs: Sequence[Run]) -> Iterator[str]:
    """First and last steps, each averaged over a tenth of the run: one step of few samples says little."""
    yield "## First and last values"
    yield ""
    wanted = [*WANTED, ("seconds a step", ("timing/all",))]
    evaluations = dict.fromkeys(name for run in runs for name in run.measured("eval/", "/accuracy"))
    wanted += [(f"held-out {name.split('/')[1]} accuracy", (name,)) for name in evaluations]
    table = []
    for title, names in wanted:
        cells = []
        for run in runs:
            curve = run.curve(*names)
            if curve is None:
                cells.append("not measured")
                continue
            part = 1 if names[0].startswith("eval/") else max(1, len(curve.values) // 10)
            first, last = (sum(side) / part for side in (curve.values[:part], curve.values[-part:]))
            cells.append(f"{first:.3g} → {last:.3g}")
        if any(cell != "not measured" for cell in cells):
            table.append([title, *cells])
    steps = [max(int(row["step"]) for row in run.rows) for run in runs]  # type: ignore[arg-type]
    yield from _table(["", *(run.name for run in runs)], [["steps", *map(str, steps)], *table])
    yield "Values of steps are means over the first and the last tenth of the steps."
    yield ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
    yield ""
