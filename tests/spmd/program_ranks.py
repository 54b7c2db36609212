"""One rank of a program, from the moment at which its process would have imported what it needs."""

import atexit
import os
import runpy
import sys

from spmd.ranks import arguments, report


def _leave(status: int) -> None:
    """End the program and not the process, which has to report."""
    atexit._run_exitfuncs()
    sys.exit(status)


def main() -> None:
    """Run a module or a file as a command with the job's words."""
    from spmd_rl.runtime import process

    asked = arguments()
    os.dup2(os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = [asked["program"], *asked["words"]]
    process.leave = _leave
    run = runpy.run_path if asked["program"].endswith(".py") else runpy.run_module
    try:
        run(asked["program"], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, f"{asked['program']} ended with {ended.code}"
    sys.stdout.flush()
    report(int(os.environ["RANK"]), {})
