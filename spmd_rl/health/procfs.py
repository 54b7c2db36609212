"""Processes of this machine as /proc shows them, and an end to them with all that they have started."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

STOPPED = ("T", "t")
GONE = ""

_PROC = Path("/proc")


def machine() -> str:
    """Name this machine, alike for processes that see each other: host, and which process numbers are valid there."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}"


def begun(process: int) -> int:
    """Return the clock ticks after boot when a process began: tells it from a later one of its number. 0: unknown."""
    fields = _fields(process)
    return int(fields[19]) if fields else 0


def state(process: int, began: int) -> str:
    """Return R runs, S sleeps, D waits in the kernel, T stopped, t stopped by a debugger, or GONE: it is not there."""
    fields = _fields(process)
    if not fields or fields[0] in ("Z", "X") or (began and int(fields[19]) != began):
        return GONE
    return fields[0]


def descendants(process: int) -> list[int]:
    """Return all that it has started and that is still there, the youngest generation last."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(process, ()))
    for one in found:  # grows while it is walked
        found += children.get(one, ())
    return found


def end_with_descendants(process: int, began: int) -> None:
    """Kill a process, unless its number is another's by now, and all that it has started; also where it is stopped."""
    if state(process, began) == GONE:
        return
    for one in (process, *descendants(process)):
        _kill(one)


def end_descendants() -> None:
    """Kill all that this process has started."""
    for one in descendants(os.getpid()):
        _kill(one)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _fields(process: int) -> list[str]:
    """Return the fields of /proc/<process>/stat from the state on; empty: it is gone, or there is no /proc."""
    try:
        text = (_PROC / str(process) / "stat").read_text(encoding="utf-8")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
