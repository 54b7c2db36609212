"""A rank's heartbeat: its status, for how long it has had it, and its main thread's stack; small, once a second."""

import faulthandler
import linecache
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec

from spmd_rl.config.names import Phase
from spmd_rl.distributed.status import RankStatus, current_status, on_status_change
from spmd_rl.health import procfs

STACK_FRAMES = 12
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_WAITS = re.compile(r"\.(wait|synchronize|item|cpu|tolist)\(")
_STATUS_BYTES = 4096
_DUMP_SECONDS = 0.3
_STILL_SECONDS = 2.0
"""Before that, nobody asks what a rank waits for."""
STOPPED_SECONDS = 5.0
"""A pause of one's own thread above this was a stop of the whole process, which is nobody's hang afterwards."""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The heartbeat of one rank."""

    rank: int
    number: int
    """Grows by one with each beat; that of a stopped process no longer does."""
    since: float = 0.0
    """The rank's own clock when its status changed last: the same for as long as it makes no progress."""
    seconds: float = 0.0
    """For how long it has had this status."""
    step: int = 0
    phase: str = Phase.START
    verb: str = ""
    doing: str = ""
    waits: str = ""
    """The call of its main thread that waits for other ranks or for the device, where it is in one."""
    busy_seconds: float = 0.0
    """Since then, what the main thread has used of a processor or waited to use."""
    stack: list[str] = []
    """Of the main thread, the innermost call first."""
    host: str = ""
    machine: str = ""
    """See procfs.machine."""
    process: int = 0
    begun: int = 0
    """See procfs.begun."""
    stacks: int = -1
    """Descriptor of a file in memory to which a signal has the stacks written; -1: none. See PostMortem."""
    status: int = -1
    """Descriptor of the file in memory that holds its status."""


class PostMortem:
    """Show other processes of this machine what this one is at after its last beat, also while it is stopped.

    Two files in memory: its status, written with every change, and its stacks, written by the handler of a signal,
    which needs nothing of Python.
    """

    def __init__(self, dump: signal.Signals) -> None:
        self.dump = dump
        self.stacks = self.status = -1
        if not hasattr(os, "memfd_create"):
            return
        self.stacks, self.status = os.memfd_create("stacks"), os.memfd_create("status")
        os.ftruncate(self.status, _STATUS_BYTES)
        self._memory = mmap.mmap(self.status, _STATUS_BYTES)
        faulthandler.register(dump, file=self.stacks, all_threads=True)
        self._write(current_status())
        on_status_change(self._write, first=True)

    def _write(self, status: RankStatus) -> None:
        text = msgspec.json.encode(_fields(status))[: _STATUS_BYTES - 4]
        self._memory[: 4 + len(text)] = len(text).to_bytes(4, "little") + text

    @staticmethod
    def status_of(beat: Heartbeat) -> Heartbeat:
        """Return a beat with the status that its process has now; as it was where that can't be read."""
        try:
            data = Path(f"/proc/{beat.process}/fd/{beat.status}").read_bytes()
            fields = msgspec.json.decode(data[4 : 4 + int.from_bytes(data[:4], "little")])
        except (OSError, ValueError):
            return beat
        if fields["since"] == beat.since:
            return beat
        # The clock is the machine's. Its last stack is that of another status.
        seconds = max(0.0, time.monotonic() - fields["since"])
        return msgspec.structs.replace(beat, seconds=seconds, busy_seconds=0.0, waits="", stack=[], **fields)

    def stacks_of(self, beat: Heartbeat) -> str:
        """Have the process of a beat write its stacks, and return them; empty: it does not."""
        if beat.stacks < 0:
            return ""
        try:
            os.kill(beat.process, self.dump)
            time.sleep(_DUMP_SECONDS)
            return Path(f"/proc/{beat.process}/fd/{beat.stacks}").read_text(errors="replace", encoding="utf-8")
        except OSError:
            return ""


class HeartbeatSource:
    """Make the beats of this process."""

    def __init__(self, rank: int, stacks: int = -1, status: int = -1) -> None:
        self.rank = rank
        self._fixed = {
            "host": socket.gethostname(),
            "machine": procfs.machine(),
            "process": os.getpid(),
            "begun": procfs.begun(os.getpid()),
            "stacks": stacks,
            "status": status,
        }
        self._main = threading.main_thread().ident
        self._schedule = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
        self._number = 0
        self._status = current_status()
        self._beaten = time.monotonic()
        self._forgiven = 0.0
        self._cpu = self._cpu_seconds()

    def beat(self) -> Heartbeat:
        """Make the next one."""
        now, status = time.monotonic(), current_status()
        if status is not self._status:
            self._status, self._forgiven, self._cpu = status, 0.0, self._cpu_seconds()
        elif now - self._beaten > STOPPED_SECONDS:
            self._forgiven += now - self._beaten
        self._beaten = now
        self._number += 1
        seconds = max(0.0, now - status.since - self._forgiven)
        frame = sys._current_frames().get(self._main or 0)
        stack = stack_of(frame)
        return Heartbeat(
            rank=self.rank,
            number=self._number,
            seconds=seconds,
            busy_seconds=self._cpu_seconds() - self._cpu,
            waits=waits_in(frame) if seconds > _STILL_SECONDS else "",
            stack=stack,
            **_fields(status),
            **self._fixed,
        )

    def _cpu_seconds(self) -> float:
        """Return how long the main thread ran or could have run: on a full machine a loop queues for a processor."""
        try:
            ran, queued, _ = self._schedule.read_text(encoding="utf-8").split()
            return (int(ran) + int(queued)) / 1e9
        except (OSError, ValueError):
            return 0.0


def _fields(status: RankStatus) -> dict[str, object]:
    return {
        "since": status.since,
        "step": status.step,
        "phase": status.phase,
        "verb": status.verb,
        "doing": status.doing,
    }


def stack_of(frame: FrameType | None) -> list[str]:
    """Return function and place of the innermost calls, the innermost first."""
    found: list[str] = []
    while frame is not None and len(found) < STACK_FRAMES:
        code = frame.f_code
        found.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return found


def waits_in(frame: FrameType | None) -> str:
    """Return the call that waits for other ranks, or for the device; empty where the innermost calls are none.

    A collective is known by torch's file; a wait for one that was begun earlier by how the innermost line is written.
    """
    inner, name = frame, ""
    for _ in range(4):  # decorators of torch are between a collective and its caller
        if frame is None:
            break
        if frame.f_code.co_filename.endswith(_COLLECTIVES):
            name = frame.f_code.co_name
        frame = frame.f_back
    if name or inner is None:
        return name
    found = _WAITS.search(_line(inner.f_code.co_filename, inner.f_lineno or 0))  # None between two lines
    return found[1] if found else ""


_read: set[str] = set()


def _line(file: str, number: int) -> str:
    """Return a line of a source file that was read before; "" until then: the disk may be what hangs."""
    if file not in _read:
        _read.add(file)
        threading.Thread(target=linecache.getlines, args=(file,), daemon=True).start()
    kept = linecache.cache.get(file, ())
    lines = kept[2] if len(kept) > 2 else ()
    return lines[number - 1] if 0 < number <= len(lines) else ""
