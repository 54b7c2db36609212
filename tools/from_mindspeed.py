"""Translate a YAML file of MindSpeed-RL, verl or TRL into one of ours: python tools/from_mindspeed.py FILE.yaml."""

import argparse
import sys
from pathlib import Path

from spmd_rl.config.foreign.lookup import PROGRAMS
from spmd_rl.config.foreign.translation import read_foreign, text, translate
from spmd_rl.distributed.terminal_lines import end_with_reader


def main() -> None:
    """Write the file, and say on stderr what was left out; the exit status is 2 where FILE cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="their YAML file")
    options = [program.option for program in PROGRAMS]
    parser.add_argument("--from", dest="program", choices=options, help="whose file it is; default: seen from it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="our YAML file; default: printed")
    parser.add_argument("--ranks", type=int, metavar="N", help="devices of the run, where the file does not say")
    parser.add_argument("--data", metavar="SOURCE", help="data.source of the run, where theirs was prepared")
    given = parser.parse_args()
    try:
        program = next((one for one in PROGRAMS if one.option == given.program), None)
        program, values = read_foreign(given.file, program)
        done = translate(program, values, given.ranks, given.data)
        written = text(done, given.file)
        if given.output:
            given.output.write_text(written, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"nothing was translated:\n{error}", file=sys.stderr)
        sys.exit(2)
    if given.output:
        print(f"{given.output}: {len(done.values)} settings; {len(done.left)} of {program.name}'s left out, at its end")
    else:
        print(written, end="")


if __name__ == "__main__":
    end_with_reader()
    main()
