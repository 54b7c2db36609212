"""The door to matplotlib: pictures of one run, or of several over each other, as wide as a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.analysis.curves import (
    CAUSE,
    OTHER,
    Run,
    labels,
    phase_seconds,
    smoothed,
    smoothing_window,
)
from spmd_rl.analysis.panels import Panel, topics

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), which colour-blind people tell apart, yellow left out: it
# is faint on white. Lines differ in their dashes too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
GREY = "#B0B0B0"
CAUSE_COLOURS = {
    "correct": "#009E73",
    "wrong": "#D55E00",
    "unparsed": "#E69F00",
    "truncated": "#56B4E9",
    "timeout": "#CC79A7",
    "crash": "#000000",
}
WIDTH_INCHES, ROW_INCHES, DPI = 6.5, 2.1, 200
FEW = 40
"""Up to so many steps every one is a bar of its own."""


def draw_all(runs: Sequence[Run], directory: Path) -> tuple[dict[str, str], list[str]]:
    """Write a PNG for each topic that any of the runs measured: (file -> caption), and what there is to know.

    Raises ValueError when the runs have no step in common with anything to draw.
    """
    pyplot = _pyplot()
    names = labels(runs)
    notes: list[str] = []
    drawn: dict[str, str] = {}
    jobs: list[tuple[str, str, Callable[[], Any]]] = [
        (file, caption, lambda panels=panels: _lines(pyplot, runs, names, panels, notes))
        for file, caption, panels in topics(runs)
    ]
    jobs.append(("time.png", "Time per phase", lambda: _times(pyplot, runs, names)))
    jobs.append(("causes.png", "Why samples got their reward", lambda: _causes(pyplot, runs, names, notes)))
    for file, caption, draw in jobs:
        figure = draw()
        if figure is not None:
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(directory / file, dpi=DPI)
            pyplot.close(figure)
            drawn[file] = caption
    if not drawn:
        raise ValueError(f"{', '.join(names)}: no metric that there is a picture of; has a step ended yet?")
    return drawn, notes


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("a PNG needs matplotlib: pip install matplotlib; or take --text") from error
    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    # Settings may be spelled in Chinese: of the fonts that know it, those that are here.
    here = {font.name for font in font_manager.fontManager.ttflist}
    chinese = ["Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei"]
    pyplot.rcParams.update(
        {
            "font.family": ["DejaVu Sans", *(font for font in chinese if font in here)],
            "font.size": 8,
            "axes.titlesize": 9,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E6E6E6",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "axes.formatter.useoffset": False,
            "axes.formatter.limits": (-3, 5),
        }
    )
    return pyplot


def _canvas(pyplot: Any, rows: int, row_inches: float, legend_lines: int) -> Any:
    height = rows * row_inches + 0.19 * legend_lines + 0.15
    return pyplot.subplots(rows, 1, figsize=(WIDTH_INCHES, height), squeeze=False, sharex=True, layout="constrained")


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str], columns: int) -> None:
    # A leading underscore hides an entry, a dollar begins a formula.
    shown = [(" " + name if name.startswith("_") else name).replace("$", r"\$") for name in names]
    figure.legend(handles, shown, loc="outside upper left", ncols=columns, fontsize=8, handlelength=2.2)


def _steps_axis(axis: Any, first: int, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    pad = max(0.5, 0.015 * (last - first))
    axis.set_xlim(first - pad, last + pad)
    axis.set_xlabel("step")


def _lines(
    pyplot: Any, runs: Sequence[Run], names: Sequence[str], panels: Sequence[Panel], notes: list[str]
) -> Any | None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    panels = [panel for panel in panels if any(run.curve(*panel.names) for run in runs)]
    if not panels:
        return None
    several = len(runs) > 1
    figure, axes = _canvas(pyplot, len(panels), ROW_INCHES, len(runs) if several else 0)
    steps: list[int] = []
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        window = 1
        values: list[float] = []
        for position, run in enumerate(runs):
            curve = run.curve(*panel.names)
            if curve is None:
                notes.append(f"{panel.title}: not measured in {names[position]}")
                continue
            colour, dash = _style(position)
            own = smoothing_window(len(curve.steps))
            window = max(window, own)
            few = len(curve.steps) <= FEW
            steps += curve.steps
            values += curve.values
            if own == 1:
                axis.plot(
                    curve.steps, curve.values, color=colour, linestyle=dash, linewidth=1.6, marker="o", markersize=3
                )
            else:
                dots = {"marker": "o", "markersize": 2} if few else {}
                axis.plot(curve.steps, curve.values, color=colour, linewidth=0.6, alpha=0.45, **dots)
                axis.plot(curve.steps, smoothed(curve.values, own), color=colour, linestyle=dash, linewidth=1.8)
            if panel.spread and not several:
                low, high = (run.curve(name) for name in panel.spread)
                if low and high and low.steps == high.steps:
                    axis.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.12, linewidth=0)
        legend = [f"thick: mean of {window} steps"] if window > 1 and any(values) else []
        legend += ["shaded: shortest to longest"] if panel.spread and not several else []
        axis.set_title(panel.title + (f"  ({'; '.join(legend)})" if legend else ""))
        axis.set_ylabel(f"% of {panel.unit}" if panel.fraction else panel.unit)
        if panel.fraction:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
            if max(values) - min(values) > 0.3 or max(values) > 0.6:
                axis.set_ylim(-0.03, 1.03)
            else:
                axis.set_ylim(bottom=min(0.0, min(values)) - 0.002, top=max(max(values) * 1.15, 0.05))
        elif not any(values):
            axis.set_ylim(-1, 1)
            axis.set_yticks([0])
            alone = all(run.settings.get("algorithm.kl_coefficient") == 0 for run in runs)
            why = ": no reference model (algorithm.kl_coefficient = 0)"
            why = why if alone and panel.names == ("actor/kl_loss",) else ""
            axis.text(0.5, 0.6, f"0 in every step{why}", transform=axis.transAxes, ha="center", color="#555555")
        elif panel.from_zero and min(values) >= 0:
            axis.set_ylim(bottom=0)
    for axis in axes[:, 0]:
        _steps_axis(axis, min(steps), max(steps))
        axis.label_outer()
    if several:
        handles = [
            Line2D([], [], color=colour, linestyle=dash, linewidth=1.8)
            for colour, dash in (_style(position) for position in range(len(runs)))
        ]
        _legend(figure, handles, names, columns=1)
    return figure


def _style(position: int) -> tuple[str, str]:
    return COLOURS[position % len(COLOURS)], DASHES[position % len(DASHES)]


def _times(pyplot: Any, runs: Sequence[Run], names: Sequence[str]) -> Any | None:
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
        stacks.append((name, run.curve("timing/all").steps, parts))  # type: ignore[union-attr]
    colours = dict(zip(shown, COLOURS, strict=False)) | {OTHER: GREY}
    return _stacked(pyplot, stacks, colours, "seconds", "Seconds a step", fraction=False)


def _causes(pyplot: Any, runs: Sequence[Run], names: Sequence[str], notes: list[str]) -> Any | None:
    found = {cause: None for run in runs for cause in run.measured(CAUSE)}
    known = [cause for cause in CAUSE_COLOURS if f"{CAUSE}{cause}" in found]
    stacks = []
    for run, name in zip(runs, names, strict=True):
        rows = [row for row in run.rows if any(row.get(f"{CAUSE}{cause}") is not None for cause in known)]
        if rows:
            parts = {cause: [row.get(f"{CAUSE}{cause}") or 0.0 for row in rows] for cause in known}
            stacks.append((name, tuple(int(row["step"]) for row in rows), parts))  # type: ignore[arg-type]
        elif known:
            notes.append(f"reward causes: not measured in {name}")
    if not stacks:
        return None
    seen = {cause: c for cause, c in CAUSE_COLOURS.items() if any(any(parts.get(cause, ())) for *_, parts in stacks)}
    return _stacked(pyplot, stacks, seen, "% of samples", "Causes of rewards", fraction=True)


def _stacked(
    pyplot: Any,
    stacks: Sequence[tuple[str, Sequence[int], Mapping[str, Sequence[float]]]],
    colours: Mapping[str, str],
    unit: str,
    title: str,
    fraction: bool,
) -> Any:
    """One panel a run, on the same scales."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import PercentFormatter

    figure, axes = _canvas(pyplot, len(stacks), ROW_INCHES, math.ceil(len(colours) / 4))
    tallest = 0.0
    for (name, steps, parts), axis in zip(stacks, axes[:, 0], strict=True):
        below = [0.0] * len(steps)
        window = 1 if len(steps) <= FEW else smoothing_window(len(steps))
        for part, colour in colours.items():
            values = smoothed(parts[part], window)
            above = [low + value for low, value in zip(below, values, strict=True)]
            if len(steps) <= FEW:
                axis.bar(steps, values, bottom=below, color=colour, width=0.85, linewidth=0)
            else:
                axis.fill_between(steps, below, above, color=colour, linewidth=0)
            below = above
        tallest = max(tallest, *below)
        label = title if len(stacks) == 1 else name
        axis.set_title((label + (f"  (mean of {window} steps)" if window > 1 else "")).replace("$", r"\$"))
        axis.set_ylabel(unit)
        axis.grid(axis="x", visible=False)
    for axis in axes[:, 0]:
        axis.set_ylim(0, 1 if fraction else tallest * 1.05 or 1)
        if fraction:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        _steps_axis(
            axis, min(s for _, steps, _ in stacks for s in steps), max(s for _, steps, _ in stacks for s in steps)
        )
        axis.label_outer()
    _legend(figure, [Patch(color=colour) for colour in colours.values()], list(colours), columns=4)
    return figure
