"""Hold a run's directory for one run: a second one in it would mix its files with the first one's.

The file says who holds the directory, and is gone when the run has ended. A process of this machine is asked for; of
another machine's the beat is watched, which it counts up every few seconds. Where the file system has locks, on one
machine or over nodes, one on the file keeps two runs from beginning at the same moment.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from spmd_rl.errors import ConfigError, Problem
from spmd_rl.health import procfs

LOCK = "run.lock"
BEAT_SECONDS = 5.0
HERE_SECONDS = 3.0
"""A process of this machine that is about to end has so long."""
ELSEWHERE_SECONDS = 20.0
"""A run of another machine that does not beat for so long is gone."""
_LOOK_SECONDS = 0.2


@dataclass
class Holder:
    """Name the process that holds a directory."""

    machine: str
    process: int
    began: int
    """As health.procfs.begun."""
    host: str
    since: str
    beat: int = 0


class RunLock:
    """Hold a directory until `release` or the end of this process; `lost` is called where another run took it.

    That can happen to a process that was stopped for long, on another machine than the one that took its directory.
    Raises ConfigError from the start where a run holds it.
    """

    def __init__(self, run_dir: Path, lost: Callable[[str], None], beat_seconds: float = BEAT_SECONDS) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._lost, self._beat_seconds = run_dir / LOCK, lost, beat_seconds
        process = os.getpid()
        now = datetime.now().isoformat(" ", "seconds")
        self._me = Holder(_machine(), process, procfs.begun(process), os.uname().nodename, now)
        self._file = self._take(run_dir)
        self._released, self._writing = threading.Event(), threading.Lock()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Give the directory back."""
        with self._writing:
            if self._released.is_set():
                return
            self._released.set()
            if _is_at(self._path, self._file):
                self._path.unlink(missing_ok=True)
            os.close(self._file)

    def _take(self, run_dir: Path) -> int:
        watched, since = None, time.monotonic()
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            free, holder = _locked(file), _holder(file)
            waited = time.monotonic() - since
            gone = holder is None or self._is_gone(holder, waited)
            if gone and free and _is_at(self._path, file):
                os.ftruncate(file, 0)
                _write(file, self._me)
                return file
            os.close(file)
            beats = watched is not None and holder is not None and holder != watched
            here = holder is not None and holder.machine == self._me.machine
            if not gone and (beats or (here and waited > HERE_SECONDS)):
                raise _taken(run_dir, holder)
            if waited > 2 * ELSEWHERE_SECONDS:
                raise _taken(run_dir, holder)
            if gone and holder is not None and waited > ELSEWHERE_SECONDS:  # a server still keeps its lock
                self._path.unlink(missing_ok=True)
            watched = watched or holder
            time.sleep(_LOOK_SECONDS)

    def _is_gone(self, holder: Holder, waited: float) -> bool:
        if holder.machine == self._me.machine:
            return procfs.state(holder.process, holder.began) == procfs.GONE
        return waited > ELSEWHERE_SECONDS

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            with self._writing:
                if self._released.is_set():
                    return
                if self._is_mine():
                    self._me.beat += 1
                    _write(self._file, self._me)
                    continue
                self._released.set()
            self._lost(f"{self._path}: another run has taken this run's directory, so this one ends")

    def _is_mine(self) -> bool:
        try:
            holder = _holder(self._file) if _is_at(self._path, self._file) else None
        except OSError:  # a disk that does not answer is no other run
            return True
        return holder is not None and (holder.machine, holder.process) == (self._me.machine, self._me.process)


def holder_here(run_dir: Path) -> Problem | None:
    """Return the problem that a run of this machine is in a directory, and does not end within a moment."""
    until = time.monotonic() + HERE_SECONDS
    while True:
        try:
            with (run_dir / LOCK).open("rb") as file:
                holder = _holder(file.fileno())
        except OSError:
            return None
        if holder is None or holder.machine != _machine():
            return None
        if procfs.state(holder.process, holder.began) == procfs.GONE:
            return None
        if time.monotonic() > until:
            return _taken(run_dir, holder).problems[0]
        time.sleep(_LOOK_SECONDS)


def _taken(run_dir: Path, holder: Holder | None) -> ConfigError:
    who = f": process {holder.process} on {holder.host}, since {holder.since}" if holder is not None else ""
    met = f"another run is in it{who}"
    return ConfigError(Problem("run.dir", run_dir, met, "give this one a run.name or run.dir of its own"))


def _machine() -> str:
    """Name this machine, also among several of the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return f"{procfs.machine()} {boot}"


def _locked(file: int) -> bool:
    """Lock a file for this process; False: another has it. A file system without locks says True."""
    try:
        # Of the process, not of the file: what it forks has no part in it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


def _holder(file: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):  # empty, or half written by a machine that went down
        return None


def _write(file: int, holder: Holder) -> None:
    """Write in place, in the same length but for a longer beat, so that whoever reads meets one or the other."""
    try:
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
        os.fsync(file)
    except OSError:
        pass  # a full disk: the lock and the process still say who holds it


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
