"""Draw pictures of one run, or of several over each other, as wide as a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_rl.analysis.axes import (
    COLOURS,
    FEW,
    ROW_INCHES,
    WIDTH_INCHES,
    draw_panel,
    legend,
    line_style,
    plain,
    steps_axis,
    striped,
    style,
)
from spmd_rl.analysis.curves import CAUSE, OTHER, PHASES, Run, phase_seconds, smoothed, smoothing_window
from spmd_rl.analysis.glyphs import families, number_missing, remark
from spmd_rl.analysis.legends import labels
from spmd_rl.analysis.panels import GIB, Panel, overview, remarks, topics
from spmd_rl.config.names import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BROWN, NAVY = "#B0B0B0", "#8C6D31", "#1B2A49"
# A phase has the same colour in every picture of every run.
PHASE_COLOURS = dict(zip((phase for phase, _ in PHASES), (*COLOURS[:6], NAVY, BROWN), strict=True)) | {OTHER: GREY}
CAUSE_COLOURS = {
    "correct": "#009E73",
    "wrong": "#D55E00",
    "unparsed": "#E69F00",
    "truncated": "#56B4E9",
    "timeout": "#CC79A7",
    "crash": "#000000",
}
GROUPS = {"all right": "groups/all_correct_fraction", "all wrong": "groups/all_wrong_fraction"}
MIXED = "mixed: these teach"
GROUP_COLOURS = {"all right": "#009E73", MIXED: "#0072B2", "all wrong": "#D55E00"}
MEMORY = {
    "rollout": Phase.ROLLOUT,
    "update": Phase.UPDATE,
    "critic": Phase.CRITIC_UPDATE,
    "log-probabilities before": Phase.POLICY_LOGPROBS,
    "reference": Phase.REFERENCE_LOGPROBS,
    "refresh and switching": Phase.TO_ROLLOUT,
}
KINDS = ("png", "pdf", "svg")
DPI = 200


@dataclass(frozen=True)
class Stack:
    """One run's parts, step by step."""

    name: str
    steps: Sequence[int]
    parts: Mapping[str, Sequence[float]]


def draw_all(runs: Sequence[Run], directory: Path, kind: str = "png") -> tuple[dict[str, str], list[str]]:
    """Write a picture for each topic that any of the runs measured: (file -> caption), and what there is to know.

    Raises ValueError when the runs have nothing to draw.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("a picture needs matplotlib: pip install matplotlib; or take --text") from error
    names = labels(runs)
    lines = {
        stem: (caption, lambda panels=panels: _lines(runs, names, panels)) for stem, caption, panels in topics(runs)
    }
    jobs: dict[str, tuple[str, Callable[[], Figure | None]]] = {
        "overview": ("Overview", lambda: _overview(runs, names)),
        **lines,
        "groups": ("Groups that teach", lambda: _groups(runs, names)),
        "causes": ("Why samples got their reward", lambda: _causes(runs, names)),
        "time": ("Time per phase", lambda: _times(runs, names)),
        "memory_by_phase": ("Memory by phase", lambda: _memory(runs, names)),
    }
    drawn: dict[str, str] = {}
    missing: set[str] = set()
    with matplotlib.rc_context(style()):
        for stem, (caption, draw) in jobs.items():
            if (figure := draw()) is not None:
                directory.mkdir(parents=True, exist_ok=True)
                missing |= number_missing(figure, families())
                figure.savefig(directory / f"{stem}.{kind}", dpi=DPI)
                drawn[f"{stem}.{kind}"] = caption
    if not drawn:
        raise ValueError(f"{', '.join(names)}: no metric that there is a picture of; has a step ended yet?")
    return drawn, [*remarks(runs), *remark(missing)]


def _figure(rows: int, columns: int, width: float, height: float, sharex: bool) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).flat)


def _lines(runs: Sequence[Run], names: Sequence[str], panels: Sequence[Panel]) -> Figure | None:
    panels = [panel for panel in panels if panel.drawn(runs)]
    if not panels:
        return None
    height = len(panels) * ROW_INCHES + 0.15 + (0.3 * len(runs) if len(runs) > 1 else 0)
    figure, axes = _figure(len(panels), 1, WIDTH_INCHES, height, sharex=True)
    _draw_panels(figure, axes, panels, runs)
    for axis in axes:
        axis.label_outer()
    _name_runs(figure, names, wide=1)
    return figure


def _overview(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    panels = overview(runs)
    if not panels:
        return None
    rows = math.ceil(len(panels) / 3)
    figure, axes = _figure(rows, 3, 2 * WIDTH_INCHES, rows * ROW_INCHES + 0.3 * len(runs), sharex=False)
    _draw_panels(figure, axes, panels, runs)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    _name_runs(figure, names if len(runs) > 1 else [_described(runs[0])], wide=2)
    return figure


def _described(run: Run) -> str:
    """Name a run by what matters most."""
    wanted = ("algorithm.advantage", "train.learning_rate", "model.path")
    told = [run.settings[name] for name in wanted if run.settings.get(name) is not None]
    said = [
        f"lr {value:g}" if isinstance(value, float) else str(value).rstrip("/").rsplit("/", 1)[-1] for value in told
    ]
    return f"{run.name}: {', '.join(said)}" if said else run.name


def _draw_panels(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel], runs: Sequence[Run]) -> None:
    steps = [step for panel, axis in zip(panels, axes, strict=False) for step in draw_panel(axis, panel, runs)]
    for axis in axes[: len(panels)]:
        steps_axis(axis, min(steps), max(steps))
    smooth = [panel for panel in panels if not panel.exact and not panel.names[0].startswith("eval/")]
    longest = max((len(curve.steps) for panel in smooth for run in runs if (curve := panel.curve(run))), default=0)
    said = [f"thick: mean of {window} steps"] if (window := smoothing_window(longest)) > 1 else []
    said += ["bars: intervals of 95 %"] if any(run.intervals.get(p.names[0]) for p in panels for run in runs) else []
    if said:
        figure.supxlabel("; ".join(said), x=0.995, ha="right", fontsize=7)


def _name_runs(figure: Figure, names: Sequence[str], wide: int) -> None:
    from matplotlib.lines import Line2D

    if len(names) == 1 and wide == 1:
        return
    styles = (line_style(position) for position in range(len(names)))
    handles = [Line2D([], [], color=colour, linestyle=dash, linewidth=1.8) for colour, dash in styles]
    legend(figure, handles, names, 1, wide)


def _times(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    timed = [(run, name) for run, name in zip(runs, names, strict=True) if run.curve("timing/all")]
    if not timed:
        return None
    spent = [phase_seconds(run) for run, _ in timed]
    # A phase that nobody can see in the picture is none of its colours.
    shown = [
        phase
        for phase in spent[0]
        if phase != OTHER and any(sum(one[phase]) > 0.005 * sum(map(sum, one.values())) for one in spent)
    ]
    stacks = []
    for (run, name), one in zip(timed, spent, strict=True):
        parts = {phase: one[phase] for phase in shown}
        rest = [values for phase, values in one.items() if phase not in shown]
        parts[OTHER] = [math.fsum(column) for column in zip(*rest, strict=True)]
        stacks.append(Stack(name, run.curve("timing/all").steps, parts))  # type: ignore[union-attr]
    return _stacked(stacks, {phase: PHASE_COLOURS[phase] for phase in (*shown, OTHER)}, "seconds", "Seconds a step")


def _causes(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    causes = {cause: f"{CAUSE}{cause}" for cause in CAUSE_COLOURS}
    stacks = [stack for run, name in zip(runs, names, strict=True) if (stack := _parts(run, name, causes))]
    seen = {cause: c for cause, c in CAUSE_COLOURS.items() if any(any(stack.parts[cause]) for stack in stacks)}
    return _stacked(stacks, seen, "% of samples", "Causes of rewards", fraction=True) if seen else None


def _groups(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    stacks = []
    for stack in (_parts(run, name, GROUPS) for run, name in zip(runs, names, strict=True)):
        if stack:
            rest = [max(0.0, 1 - sum(each)) for each in zip(*stack.parts.values(), strict=True)]
            stacks.append(Stack(stack.name, stack.steps, {**stack.parts, MIXED: rest}))
    title = "Groups of a step: the samples of one prompt"
    return _stacked(stacks, GROUP_COLOURS, "% of groups", title, fraction=True) if stacks else None


def _parts(run: Run, name: str, metrics: Mapping[str, str]) -> Stack | None:
    rows = [row for row in run.rows if any(row.get(metric) is not None for metric in metrics.values())]
    parts = {part: [row.get(metric) or 0.0 for row in rows] for part, metric in metrics.items()}
    return Stack(name, [int(row["step"] or 0) for row in rows], parts) if rows else None


def _memory(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    """Draw the peak of each phase, one panel a run, on the same scale."""
    from matplotlib.lines import Line2D

    phases = {name: f"memory/{phase}/peak_bytes" for name, phase in MEMORY.items()}
    found = [
        (name, {phase: curve for phase, metric in phases.items() if (curve := run.curve(metric))})
        for run, name in zip(runs, names, strict=True)
    ]
    found = [(name, curves) for name, curves in found if curves]
    if not found:
        return None
    highest = max(value * GIB for _, curves in found for curve in curves.values() for value in curve.values)
    figure, axes = _figure(len(found), 1, WIDTH_INCHES, len(found) * ROW_INCHES + 0.5, sharex=True)
    for (name, curves), axis in zip(found, axes, strict=True):
        dashes = striped(curves, 0.015 * highest / GIB)
        for phase, curve in curves.items():
            values = [value * GIB for value in curve.values]
            axis.plot(curve.steps, values, color=PHASE_COLOURS[phase], linewidth=1.6, linestyle=dashes[phase])
        title = "Peak memory of a rank in each phase" if len(found) == 1 else name
        axis.set_title(plain(title), fontsize=9 if len(found) == 1 else 8)
        axis.set_ylabel("GiB")
    steps = [step for _, curves in found for curve in curves.values() for step in curve.steps]
    for axis in axes:
        axis.set_ylim(0, highest * 1.08)
        steps_axis(axis, min(steps), max(steps))
        axis.label_outer()
    seen = [phase for phase in phases if any(phase in curves for _, curves in found)]
    legend(figure, [Line2D([], [], color=PHASE_COLOURS[phase], linewidth=1.8) for phase in seen], seen, columns=4)
    return figure


def _stacked(
    stacks: Sequence[Stack], colours: Mapping[str, str], unit: str, title: str, fraction: bool = False
) -> Figure:
    """Draw one panel a run, on the same scales."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import PercentFormatter

    height = len(stacks) * ROW_INCHES + 0.19 * math.ceil(len(colours) / 4) + 0.15
    figure, axes = _figure(len(stacks), 1, WIDTH_INCHES, height, sharex=True)
    tallest = 0.0
    for stack, axis in zip(stacks, axes, strict=True):
        window = 1 if len(stack.steps) <= FEW else smoothing_window(len(stack.steps))
        tallest = max(tallest, *_draw_stack(axis, stack, colours, window))
        label = title if len(stacks) == 1 else stack.name
        averaged = f"  (mean of {window} steps)" if window > 1 else ""
        axis.set_title(plain(label + averaged), fontsize=9 if len(stacks) == 1 else 8)
        axis.set_ylabel(unit)
        axis.grid(axis="x", visible=False)
    steps = [step for stack in stacks for step in stack.steps]
    for axis in axes:
        axis.set_ylim(0, 1 if fraction else tallest * 1.05 or 1)
        if fraction:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        steps_axis(axis, min(steps), max(steps))
        axis.label_outer()
    legend(figure, [Patch(color=colour) for colour in colours.values()], list(colours), columns=4)
    return figure


def _draw_stack(axis: Axes, stack: Stack, colours: Mapping[str, str], window: int) -> list[float]:
    """Draw parts above each other; return their sums."""
    below = [0.0] * len(stack.steps)
    for part, colour in colours.items():
        values = smoothed(stack.parts[part], window)
        above = [low + value for low, value in zip(below, values, strict=True)]
        if len(stack.steps) <= FEW:
            axis.bar(stack.steps, values, bottom=below, color=colour, width=0.85, linewidth=0)
        else:
            axis.fill_between(stack.steps, below, above, color=colour, linewidth=0)
        below = above
    return below
