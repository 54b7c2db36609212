"""Draw the curves of a run, or of several over each other: python tools/plot_run.py runs/NAME [runs/OTHER ...]

Pictures and a page with them (report.md) go to --output; --text plots in the terminal instead.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from spmd_rl.analysis.curves import CORRECTED, Run, as_text, curves, read_intervals, read_run
from spmd_rl.analysis.figures import KINDS, draw_all
from spmd_rl.analysis.legends import labels
from spmd_rl.analysis.run_page import as_page, with_files
from spmd_rl.analysis.self_correction import frequency, insight
from spmd_rl.data.samples import SAMPLES, read_samples
from spmd_rl.distributed.terminal_lines import end_with_reader

LONGEST_NAME = 100


def with_answers(run: Run, run_dir: Path) -> Run:
    """Return the run with intervals of its evaluations and, where it wrote samples, how many correct themselves."""
    run = replace(run, intervals=read_intervals(run_dir))
    if not any((run_dir / SAMPLES).glob("step_*.jsonl")):
        return run
    found = frequency((sample["step"], insight(sample) is not None) for sample in read_samples(run_dir))
    return replace(run, rows=[*run.rows, *({"step": step, CORRECTED: part} for step, part in found.items())])


def text(runs: Iterable[Run], names: Iterable[str], width: int) -> str:
    return "\n".join(f"{name}\n{as_text(curves(run.rows), width)}" for run, name in zip(runs, names, strict=True))


def place(run_dirs: Sequence[Path]) -> Path:
    """Return where pictures go: a run's into its directory, those of several into one of their own beside the first."""
    if len(run_dirs) == 1:
        return run_dirs[0] / "report"
    name = "_".join(run_dir.resolve().name for run_dir in run_dirs)
    if len(name) > LONGEST_NAME:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        name = f"{name[: LONGEST_NAME - 9]}_{digest}"
    return run_dirs[0].resolve().parent / "comparisons" / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="directories of runs")
    parser.add_argument("--text", action="store_true", help="plot in the terminal")
    parser.add_argument("--format", choices=KINDS, default="png", help="of the pictures; pdf and svg are for papers")
    where = "default: report/ in the run's directory; of several runs, comparisons/ beside the first one's"
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    arguments = parser.parse_args()
    try:
        runs = [read_run(run_dir) for run_dir in arguments.run_dirs]
        if arguments.text:
            width = min(100, shutil.get_terminal_size().columns)
            print(text(runs, labels(runs), width) if len(runs) > 1 else as_text(curves(runs[0].rows), width))
            return
        runs = [with_answers(*pair) for pair in zip(runs, arguments.run_dirs, strict=True)]
        output = arguments.output or place(arguments.run_dirs)
        pictures, notes = draw_all(runs, output, arguments.format)
        page, shown = with_files(as_page(runs, pictures, notes, arguments.run_dirs))
        for name, content in shown.items():
            (output / name).write_bytes(content)
        (output / "report.md").write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"plot_run: {error}")
    for note in notes:
        print(note)
    for name in (*pictures, "report.md"):
        print(output / name)


if __name__ == "__main__":
    end_with_reader()
    main()
