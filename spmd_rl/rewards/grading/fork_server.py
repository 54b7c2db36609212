"""The pool's side of the process that has imported the rules and forks graders."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from spmd_rl.rewards.grading.grader_process import REPLY, REQUEST, Ready, Setup, frame, kill_group

START_SECONDS = 300.0
"""Limit for importing the rules, and for what they `prepare`."""
_ANSWER_SECONDS = 30.0
"""Limit for forking a process; it takes milliseconds."""

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class ForkServer:
    """The process that has imported the rules and forks graders."""

    def __init__(self, rules: list[str], memory_mib: int):
        self._rules = rules
        python_path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "spmd_rl.rewards.grading.grader_process",
                    str(os.getpid()),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            )
        self._control.settimeout(_ANSWER_SECONDS)
        self._control.sendall(frame(Setup(rules, sys.path, memory_mib)))

    def ready(self, given_up: Callable[[], bool]) -> Ready:
        """Wait until it has imported the rules; a ValueError says why it can't."""
        deadline = time.monotonic() + START_SECONDS
        self._control.settimeout(0.1)
        data = bytearray()
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            try:
                chunk = self._control.recv(1 << 16)
            except TimeoutError:
                chunk = None
            except ConnectionError:
                chunk = b""
            if chunk == b"":
                raise ValueError(
                    f"reward.rules = {self._rules}: a reward worker {_how_ended(self._process.wait())} while it "
                    "imported and prepared them; its own last words are above"
                )
            data += chunk or b""
            if time.monotonic() > deadline or given_up():
                raise ValueError(
                    f"reward.rules = {self._rules}: a grader process was still importing and preparing them after "
                    f"{START_SECONDS:.0f} s, which is all the time they have; make what takes longer beforehand"
                )
        ready = msgspec.msgpack.decode(data[4:], type=Ready)
        if ready.error:
            raise ValueError(ready.error)
        self._control.settimeout(_ANSWER_SECONDS)
        return ready

    def fork(self, descriptor: socket.socket) -> int:
        """Process id of a new grader that talks on `descriptor`."""
        return self._ask(b"f", 0, 0.0, [descriptor.fileno()])

    def kill(self, process: int) -> None:
        """Have a grader and everything that it started ended; doesn't wait until they are gone."""
        kill_group(process)
        try:
            self._control.sendall(REQUEST.pack(b"k", process, 0.0))
        except OSError as error:
            raise RuntimeError(f"the reward workers' parent process does not answer: {error}") from error

    def end(self, process: int, patience_seconds: float) -> str:
        """Wait so long for a grader to end by itself, then kill it; returns how it ended."""
        return _how_ended(self._ask(b"r", process, patience_seconds))

    def _ask(self, kind: bytes, process: int, seconds: float, descriptors: list[int] | None = None) -> int:
        try:
            socket.send_fds(self._control, [REQUEST.pack(kind, process, seconds)], descriptors or [])
            data = b""
            while len(data) < REPLY.size:
                chunk = self._control.recv(REPLY.size - len(data))
                if not chunk:
                    raise ConnectionError("it has ended")
                data += chunk
        except OSError as error:
            raise RuntimeError(f"the reward workers' parent process does not answer: {error}") from error
        return REPLY.unpack(data)[0]

    def close(self, graders: Iterable[int]) -> None:
        """Kill it and its graders, and wait until they are gone."""
        for process in graders:
            try:
                self.end(process, 0.0)
            except RuntimeError:
                break  # they die with it
        self._control.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _how_ended(code: int) -> str:
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
