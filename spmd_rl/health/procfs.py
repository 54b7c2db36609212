"""What the kernel says of processes of this machine (/proc), and how to end them with all that they have started."""

import os
import signal
import socket
from pathlib import Path

STOPPED = ("T", "t")
GONE = ""

_PROC = Path("/proc")


def machine() -> str:
    """The same for two processes that see each other: a host's name, and which process numbers are valid there."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}"


def begun(process: int) -> int:
    """When a process began, in clock ticks after boot: with its number, what tells it from a later one. 0: unknown."""
    fields = _fields(process)
    return int(fields[19]) if fields else 0


def state(process: int, began: int) -> str:
    """R runs, S sleeps, D waits in the kernel, T stopped, t stopped by a debugger; GONE: there is no such process."""
    fields = _fields(process)
    if not fields or fields[0] in ("Z", "X") or (began and int(fields[19]) != began):
        return GONE
    return fields[0]


def descendants(process: int) -> list[int]:
    """All that it has started and that is still there, the youngest generation last."""
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
    below = descendants(process)
    for one in (process, *below):
        _kill(one)


def end_descendants() -> None:
    """Kill all that this process has started."""
    for one in descendants(os.getpid()):
        _kill(one)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _fields(process: int) -> list[str]:
    """Of /proc/<process>/stat, those after the command's name: state, parent, ...; empty: gone, or no such system."""
    try:
        text = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
