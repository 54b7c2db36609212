"""Processes that must not outlive the one that started them; no torch."""

import ctypes
import os
import signal
import sys


def die_with(parent: int, received: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, however it ends: one stuck in C hears of nothing else.

    `received`: the signal that it is sent.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, received, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def die_with_all(parent: int) -> None:
    """`die_with`, for this process and for those that it will fork."""
    die_with(parent)
    os.register_at_fork(after_in_child=lambda: die_with(os.getppid()))
