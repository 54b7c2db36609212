"""Write and leave while a disk, a pipe or a lock may be what hangs."""

import os
import threading
from collections.abc import Callable

from spmd_rl.health import procfs
from spmd_rl.health.error_file import ERROR_FILE, write_error

HUNG = 75
"""Exit status of every rank of a run that hung: EX_TEMPFAIL, "try again later"."""

_IO_SECONDS = 1.0


def done_in_time(act: Callable[[], object], seconds: float = _IO_SECONDS) -> bool:
    """Do something with a disk or a pipe that may be what hangs; False when it was not done in time."""
    done = threading.Event()

    def doing() -> None:
        try:
            act()
            done.set()
        except OSError:
            pass  # full, or another node's

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def to_stderr(text: str) -> None:
    """Write past sys.stderr, whose lock the main thread may hold."""
    if os.isatty(2):
        text = "\x1b[?25h" + text  # show the cursor again, which a live progress display hides
    done_in_time(lambda: os.write(2, text.encode()))


def exit_hung(reason: str) -> None:
    """End this process and all that it has started; torchrun gets the reason."""
    # The main thread may be about to leave with an error of its own, which is not the reason.
    file = os.environ.pop(ERROR_FILE, "")
    done_in_time(lambda: write_error(reason, reason, file))
    procfs.end_descendants()
    os._exit(HUNG)
