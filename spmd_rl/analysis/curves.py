"""Read what a run measured as curves: of its metrics, of its evaluations with their intervals, of its phases."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.config.loading import read_settings
from spmd_rl.config.names import REWARDS, Phase
from spmd_rl.data.samples import samples_step
from spmd_rl.evaluation.benchmark import accuracy_interval
from spmd_rl.runlog.run_dir import EVALUATIONS, METRICS

TRAINING_ACCURACY = "reward/cause/correct"
CAUSE = "reward/cause/"
CORRECTED = "samples/corrected_fraction"
"""Not in metrics.jsonl: the fraction of a step's written samples that correct themselves."""

WANTED = (
    ("reward", REWARDS),
    ("accuracy while training", (TRAINING_ACCURACY,)),
    ("response length, tokens", ("response_length/mean",)),
    ("entropy", ("actor/entropy",)),
    ("variance of the returns that the critic explains", ("critic/explained_variance",)),
)
# Phases never overlap; `timing/rule_reward` and the like, which are hidden behind others, are none.
PHASES = (
    ("rollout", (Phase.ROLLOUT,)),
    ("update", (Phase.UPDATE, Phase.CRITIC_UPDATE)),
    ("log-probabilities before", (Phase.POLICY_LOGPROBS,)),
    ("reference", (Phase.REFERENCE_LOGPROBS,)),
    ("critic", (Phase.CRITIC_VALUES,)),
    ("waiting for reward workers", ("non_overlap_rule_reward",)),
    ("refresh and switching", (Phase.TO_ROLLOUT, Phase.TO_TRAINING)),
    ("checkpoint", (Phase.CHECKPOINT,)),
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
    intervals: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Metric -> step -> interval of 95 %."""

    def curve(self, *names: str, title: str = "") -> Curve | None:
        """Return the first of these metrics that was measured."""
        for name in names:
            points = [(int(row["step"]), value) for row in self.rows if (value := row.get(name)) is not None]  # type: ignore[arg-type]
            if points:
                steps, values = zip(*points, strict=True)
                return Curve(title or name, steps, values)
        return None

    def measured(self, prefix: str, suffix: str = "") -> list[str]:
        """Return the names of its metrics, in the order in which they first appear."""
        names = (name for row in self.rows for name, value in row.items() if value is not None)
        return [name for name in dict.fromkeys(names) if name.startswith(prefix) and name.endswith(suffix)]


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    """Return the rows of a run, finished or still going on. Raises ValueError when there are none."""
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
    """Return metrics and settings of a run, finished or still going on. Raises ValueError when there are no metrics."""
    rows = read_rows(run_dir)
    config = run_dir / "config.yaml"
    return Run(run_dir.resolve().name, rows, read_settings(config) if config.exists() else {})


def read_intervals(run_dir: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Return intervals of the accuracies that a run's evaluations have, from the answers they wrote."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for path in sorted((run_dir / EVALUATIONS).glob("step_*_*.jsonl")):
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            interval = accuracy_interval(lines)
        except (ValueError, KeyError, TypeError, IndexError):  # being written just now, or of another program
            continue
        name = f"eval/{path.stem.split('_', 2)[2]}/accuracy"
        found.setdefault(name, {})[samples_step(path.name)] = interval
    return found


def curves(rows: Sequence[dict[str, float | None]]) -> list[Curve]:
    """Return reward, accuracy, length, entropy, what a critic explains, and accuracies held out, where measured."""
    run = Run("", list(rows))
    held_out = [(f"held-out {name.split('/')[1]} accuracy", (name,)) for name in run.measured("eval/", "/accuracy")]
    wanted = (run.curve(*names, title=title) for title, names in (*WANTED, *held_out))
    return [curve for curve in wanted if curve]


def phase_seconds(run: Run) -> dict[str, list[float]]:
    """Return phase -> seconds in each of the steps that were timed, the rest as "other"; they add up to it."""
    timed = [row for row in run.rows if row.get("timing/all") is not None]
    found = {
        phase: [sum(row.get(f"timing/{name}") or 0.0 for name in names) for row in timed] for phase, names in PHASES
    }
    spent = [sum(seconds) for seconds in zip(*found.values(), strict=True)]
    found[OTHER] = [max(0.0, (row["timing/all"] or 0.0) - known) for row, known in zip(timed, spent, strict=True)]
    return found


def smoothing_window(points: int) -> int:
    """Return over how many steps a smoothed line averages: a tenth of them, an odd number; 1: too few to smooth."""
    return 1 if points < 8 else max(3, points // 10 | 1)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over `window` steps around each; at the ends, over those of them that there are."""
    half = window // 2
    parts = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _whole_ticks(steps: Sequence[int], most: int = 6) -> list[int]:
    """Return steps to name on an axis: the first, and on from there by whole numbers."""
    first, last = min(steps), max(steps)
    return list(range(first, last + 1, max(1, -(-(last - first) // most))))


def as_text(found: Sequence[Curve], width: int, height: int = 12) -> str:
    """Return plots for a terminal without colours, one below the other."""
    import plotext

    plots = []
    for curve in found:
        figure = plotext.figure.clear()
        figure.plot_size(width, height)
        figure.title(f"{curve.title}: {curve.values[0]:.3g} -> {curve.values[-1]:.3g}")
        figure.label("step", "x")
        signal = figure.signal(list(curve.steps), list(curve.values), marker="braille")
        figure.draw(signal.lines())
        figure.ruler("x").ticks(_whole_ticks(curve.steps))
        plots.append(plotext.uncolorize(str(figure.build())))
    return "\n".join(plots)
