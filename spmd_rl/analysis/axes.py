"""Draw on one set of axes of matplotlib: style, legends, the lines of a panel."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spmd_rl.analysis.curves import Curve, Run, smoothed, smoothing_window
from spmd_rl.analysis.glyphs import families
from spmd_rl.analysis.panels import Panel

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), which colour-blind people tell apart, yellow left out: it
# is faint on white. Lines differ in their dashes too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
WIDTH_INCHES, ROW_INCHES = 6.5, 2.1
_STRIPE = 5.0
"""So many widths of a line are a stripe's length."""
FEW = 40
"""Up to so many steps every one is a point or a bar of its own."""
_TITLE_COLUMNS, _LEGEND_COLUMNS = 88, 90
"""Characters of a line as wide as a page."""


def style() -> dict[str, object]:
    """Return matplotlib's settings for all pictures."""
    return {
        "font.family": families(),  # settings may be in Chinese
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
        "axes.formatter.use_mathtext": True,
        "pdf.fonttype": 42,
    }


def line_style(position: int) -> tuple[str, str]:
    """Return colour and dashes of a run."""
    return COLOURS[position % len(COLOURS)], DASHES[position % len(DASHES)]


def striped(curves: Mapping[str, Curve], near: float) -> dict[str, tuple[float, tuple[float, float]] | str]:
    """Return the dashes of curves, of which those that lie on each other, nowhere `near` apart, take turns."""
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            apart = [abs(one - other) for one, other in zip(first.values, curve.values, strict=False)]
            if list(first.steps) == list(curve.steps) and max(apart, default=0.0) < near:
                group.append(name)
                break
        else:
            groups.append([name])
    dashes: dict[str, tuple[float, tuple[float, float]] | str] = {}
    for group in groups:
        rest = _STRIPE * (len(group) - 1)
        for place, name in enumerate(group):
            dashes[name] = ((rest + _STRIPE - _STRIPE * place), (_STRIPE, rest)) if rest else "-"
    return dashes


def plain(text: str, columns: int = _TITLE_COLUMNS, lines: int = 2) -> str:
    """Return text that fits; a dollar, which begins a formula, as it is."""
    return textwrap.fill(text, columns, max_lines=lines, placeholder=" …").replace("$", r"\$")


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str], columns: int, wide: int = 1) -> None:
    """Put a legend above the axes, `wide` pages wide."""
    # A leading underscore hides an entry.
    columns = 3 if columns == 4 and any(len(name) > 20 for name in names) else columns
    shown = [
        plain((" " + name if name.startswith("_") else name), _LEGEND_COLUMNS * wide // columns, 2) for name in names
    ]
    figure.legend(handles, shown, loc="outside upper left", ncols=columns, fontsize=8, handlelength=2.2)


def steps_axis(axis: Axes, first: int, last: int) -> None:
    """Show these steps, whole numbers, on an axis."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    pad = max(0.5, 0.015 * (last - first))
    axis.set_xlim(first - pad, last + pad)
    axis.set_xlabel("step")


def draw_panel(axis: Axes, panel: Panel, runs: Sequence[Run]) -> list[int]:
    """Draw the lines of all runs that measured it; return their steps."""
    steps: list[int] = []
    values: list[float] = []
    for position, run in enumerate(runs):
        curve = panel.curve(run)
        if curve is None:
            continue
        steps += curve.steps
        values += curve.values
        values += _draw_line(axis, curve, position, panel, run, alone=len(runs) == 1)
    shaded = "  (shaded: smallest to largest)" if panel.spread and len(runs) == 1 else ""
    axis.set_title(plain(panel.title + shaded))
    axis.set_ylabel(f"% of {panel.unit}" if panel.fraction else panel.unit)
    _limits(axis, panel, values)
    return steps


def _draw_line(axis: Axes, curve: Curve, position: int, panel: Panel, run: Run, alone: bool) -> list[float]:
    """Draw a run's line; return the ends of its intervals and of what is shaded."""
    colour, dash = line_style(position)
    window = 1 if panel.exact else smoothing_window(len(curve.steps))
    intervals = run.intervals.get(panel.names[0], {})
    ends: list[float] = []
    if window == 1 or intervals:
        dots = {"marker": "o", "markersize": 3} if len(curve.steps) <= FEW else {}
        axis.plot(curve.steps, curve.values, color=colour, linestyle=dash, linewidth=1.6, **dots)
    else:
        dots = {"marker": "o", "markersize": 2} if len(curve.steps) <= FEW else {}
        axis.plot(curve.steps, curve.values, color=colour, linewidth=0.6, alpha=0.45, **dots)
        axis.plot(curve.steps, smoothed(curve.values, window), color=colour, linestyle=dash, linewidth=1.8)
    known = [
        (step, value, *intervals[step])
        for step, value in zip(curve.steps, curve.values, strict=True)
        if step in intervals
    ]
    if known:
        # Of several runs, beside each other.
        shift = 0.0 if alone else 0.006 * (position - 1) * max(1, curve.steps[-1] - curve.steps[0])
        at, means, lows, highs = zip(*known, strict=True)
        below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
        above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
        axis.errorbar(
            [x + shift for x in at], means, [below, above], fmt="none", ecolor=colour, capsize=2.5, elinewidth=1
        )
        ends = [*lows, *highs]
    if panel.spread and alone:
        low, high = (run.curve(name) for name in panel.spread)
        if low and high and low.steps == high.steps:
            axis.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.12, linewidth=0)
            ends += [*low.values, *high.values]
    return ends


def _limits(axis: Axes, panel: Panel, values: Sequence[float]) -> None:
    from matplotlib.ticker import PercentFormatter

    if panel.fraction:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        if max(values) - min(values) > 0.3 or max(values) > 0.6:
            axis.set_ylim(-0.03, 1.03)
        else:
            axis.set_ylim(bottom=min(0.0, min(values)) - 0.002, top=max(max(values) * 1.15, 0.05))
    elif panel.from_zero and min(values) >= 0:
        axis.set_ylim(bottom=0, top=max(values) * 1.08 or 1)
