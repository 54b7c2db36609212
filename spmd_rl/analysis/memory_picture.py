"""Draw what a rank holds over a step, part upon part: a bar a phase, as wide as it lasts where that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spmd_rl.analysis.axes import COLOURS, WIDTH_INCHES, plain, style
from spmd_rl.analysis.panels import GIB

_MORE = ("#B0B0B0", "#8C6D31", "#1B2A49", "#6A3D9A", "#CAB2D6", "#B2DF8A", "#FB9A99")
_LEAST_WIDTH = 0.06
"""Of the picture: the shortest phase can be seen."""


def draw_memory(
    path: Path,
    phases: Mapping[str, Mapping[str, int]],
    order: Sequence[str],
    title: str,
    seconds: Mapping[str, float],
    room: int | None,
) -> None:
    """Write the picture. `phases`: bytes of each part in `order`, by phase; `room`: what a device has, a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [name for name in order if any(name in held for held in phases.values())]
    colours = dict(zip(order, (_MORE[0], *COLOURS[:6], *_MORE[1:], COLOURS[6]), strict=False))
    whole = sum(seconds.get(phase, 0.0) for phase in phases)
    widths = [max(_LEAST_WIDTH, seconds.get(phase, 0.0) / whole if whole else 0.0) for phase in phases]
    lefts = [sum(widths[:number]) for number in range(len(widths))]
    with pyplot.rc_context(style()):
        figure, axis = pyplot.subplots(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        bottoms = [0.0] * len(widths)
        for part in parts:
            heights = [held.get(part, 0) * GIB for held in phases.values()]
            axis.bar(lefts, heights, widths, bottoms, align="edge", label=part, color=colours[part], edgecolor="white")
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
        if room is not None:
            axis.axhline(room * GIB, color="black", linewidth=1, linestyle="--")
            axis.annotate("can be counted on", (0, room * GIB), ha="left", va="bottom")
        middles = [left + width / 2 for left, width in zip(lefts, widths, strict=True)]
        axis.set_xticks(middles, list(phases), rotation=50, ha="right")
        axis.set_ylim(0, 1.12 * max(*bottoms, (room or 0) * GIB))
        axis.set_ylabel("GiB on the fullest rank")
        axis.set_title(plain(title))
        axis.grid(visible=False, axis="x")
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        figure.savefig(path, dpi=160)
        pyplot.close(figure)
