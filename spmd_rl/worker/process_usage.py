"""A rank's use of its machine beside the device: memory, descriptors, processes, files in memory and on disk."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class ProcessUsage:
    """One rank now. It grows while a run warms up and stays level after that, or something is not given back."""

    resident_bytes: int
    """Of this process."""
    children_bytes: int
    """Resident in the processes that it started, and they did: graders; while a checkpoint is written, its writer."""
    open_files: int
    """Descriptors of this process: files, sockets, pipes."""
    processes: int
    """Those that it started, and they did."""
    shared_memory_files: int
    """Of /dev/shm, mapped or open in any of these processes; also those that have no name there any more."""
    temporary_files: int
    """Entries of the directory for temporary files (TMPDIR) that came since the rank began and are this user's: the
    run's own where the directory is."""


class ProcessUsageMeter:
    """Measures this process and those below it; a measurement takes milliseconds."""

    def __init__(self) -> None:
        self._temporary = Path(tempfile.gettempdir())
        self._there_before = frozenset(os.listdir(self._temporary))

    def now(self) -> ProcessUsage:
        this = psutil.Process()
        children = this.children(recursive=True)
        held_by_children, shared = 0, shared_memory(this.pid)
        for child in children:
            try:
                held_by_children += child.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # it ended a moment ago
            shared |= shared_memory(child.pid)
        return ProcessUsage(
            resident_bytes=this.memory_info().rss,
            children_bytes=held_by_children,
            open_files=this.num_fds(),
            processes=len(children),
            shared_memory_files=len(shared),
            temporary_files=self._temporary_files(),
        )

    def _temporary_files(self) -> int:
        came = 0
        with os.scandir(self._temporary) as entries:
            for entry in entries:
                if entry.name not in self._there_before:
                    try:
                        came += entry.stat(follow_symlinks=False).st_uid == os.getuid()
                    except FileNotFoundError:
                        continue  # it went a moment ago
        return came


def shared_memory(process: int) -> set[str]:
    """Files of /dev/shm, by path, that a process has mapped or open; none of another user's."""
    directory = Path("/proc") / str(process)
    try:
        maps = (directory / "maps").read_text(errors="replace", encoding="utf-8").splitlines()
        found = {line[line.index(_SHARED_MEMORY) :] for line in maps if _SHARED_MEMORY in line}
        for descriptor in os.listdir(directory / "fd"):
            try:
                name = os.readlink(directory / "fd" / descriptor)
            except FileNotFoundError:
                continue  # closed a moment ago: the one that lists the directory, for one
            if name.startswith(_SHARED_MEMORY):
                found.add(name)
    except OSError:
        return set()  # it ended a moment ago, or is another user's
    return found
