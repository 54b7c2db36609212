"""A run's curves, from its metrics.jsonl."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.controller.run_log import METRICS

TRAINING_ACCURACY = "reward/cause/correct"
WANTED = (
    ("reward", "grpo/rewards/mean"),
    ("accuracy while training", TRAINING_ACCURACY),
    ("response length, tokens", "response_length/mean"),
    ("entropy", "actor/entropy"),
)


@dataclass(frozen=True)
class Curve:
    """One metric over the steps it was measured at."""

    title: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def read_rows(run_dir: Path) -> list[dict[str, float | None]]:
    """The rows of a run, finished or still going on. Raises ValueError when there are none."""
    path = run_dir / METRICS
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the directory of a run, such as runs/grpo")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A line without its end is one that is being written just now.
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if not rows:
        raise ValueError(f"{path} has no rows yet")
    return rows


def curves(rows: Sequence[dict[str, float | None]]) -> list[Curve]:
    """Reward, accuracy, length, entropy, and the accuracy of each evaluation; what was not measured is left out."""
    measured = [name for row in rows for name in row if name.startswith("eval/") and name.endswith("/accuracy")]
    wanted = [(f"held-out {name.split('/')[1]} accuracy", name) for name in dict.fromkeys(measured)]
    found = []
    for title, name in (*WANTED, *wanted):
        points = [(int(row["step"]), value) for row in rows if (value := row.get(name)) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            found.append(Curve(title, steps, values))
    return found


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


def as_png(found: Sequence[Curve], path: Path) -> None:
    """The same curves in one picture. Raises ValueError when matplotlib is not there."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("a PNG needs matplotlib: pip install matplotlib; or take --text") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 1, figsize=(7, 2.2 * len(found)), squeeze=False, layout="constrained")
    for axis, curve in zip(axes[:, 0], found, strict=True):
        axis.plot(curve.steps, curve.values, marker="." if len(curve.steps) < 10 else "")
        axis.set_title(curve.title)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=120)
