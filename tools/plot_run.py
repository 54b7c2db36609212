"""Show a run's curves: python tools/plot_run.py runs/NAME --text (in the terminal) or without --text (a PNG)."""

import argparse
import shutil
import sys
from pathlib import Path

from spmd_rl.controller.report import as_png, as_text, curves, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--text", action="store_true", help="plot in the terminal")
    parser.add_argument("--output", type=Path, help="where the PNG goes (default: curves.png in the run's directory)")
    arguments = parser.parse_args()
    try:
        found = curves(read_rows(arguments.run_dir))
        if arguments.text:
            print(as_text(found, width=min(100, shutil.get_terminal_size().columns)))
        else:
            path = arguments.output or arguments.run_dir / "curves.png"
            as_png(found, path)
            print(path)
    except ValueError as error:
        sys.exit(f"plot_run: {error}")


if __name__ == "__main__":
    main()
