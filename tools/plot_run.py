"""Draw the curves of a run, or of several over each other: python tools/plot_run.py runs/NAME [runs/OTHER ...]

PNGs and a page with them (report.md) go to --output; --text plots in the terminal instead.
"""

import argparse
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from spmd_rl.analysis.curves import CORRECTED, Run, as_page, as_text, curves, labels, read_run
from spmd_rl.analysis.figures import draw_all
from spmd_rl.analysis.self_correction import frequency, insight
from spmd_rl.data.samples import SAMPLES, read_samples


def with_self_correction(run: Run, run_dir: Path) -> Run:
    """The run with one more metric, where it wrote samples."""
    if not any((run_dir / SAMPLES).glob("step_*.jsonl")):
        return run
    found = frequency((sample["step"], insight(sample) is not None) for sample in read_samples(run_dir))
    return replace(run, rows=[*run.rows, *({"step": step, CORRECTED: part} for step, part in found.items())])


def text(runs: Iterable[Run], names: Iterable[str], width: int) -> str:
    return "\n".join(f"{name}\n{as_text(curves(run.rows), width)}" for run, name in zip(runs, names, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="directories of runs")
    parser.add_argument("--text", action="store_true", help="plot in the terminal")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: report/ in the first run's directory")
    arguments = parser.parse_args()
    try:
        runs = [read_run(run_dir) for run_dir in arguments.run_dirs]
        if arguments.text:
            width = min(100, shutil.get_terminal_size().columns)
            print(text(runs, labels(runs), width) if len(runs) > 1 else as_text(curves(runs[0].rows), width))
            return
        runs = [with_self_correction(*pair) for pair in zip(runs, arguments.run_dirs, strict=True)]
        output = arguments.output or arguments.run_dirs[0] / "report"
        pictures, notes = draw_all(runs, output)
        (output / "report.md").write_text(as_page(runs, pictures, notes), encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"plot_run: {error}")
    for note in notes:
        print(note)
    for name in (*pictures, "report.md"):
        print(output / name)


if __name__ == "__main__":
    main()
