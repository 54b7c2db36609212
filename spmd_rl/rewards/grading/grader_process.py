"""Grader processes: read samples, write results, and are killed when a rule takes too long.

Started by fork_server.py as `python -m spmd_rl.rewards.grading.grader_process PARENT_PID DESCRIPTOR`: a parent that
imports the rules once, and forks a grader whenever it is asked to, so that one that was killed is replaced in
milliseconds. It runs no rule itself.
Messages are msgpack behind their length (4 bytes, little-endian). To the parent: a Setup, answered by a Ready; then
REQUESTs, each answered by a REPLY. To a grader: Batches, answered by one GradingResult a sample and rule.
"""

import asyncio
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from spmd_rl.distributed.terminal_lines import share_terminal
from spmd_rl.health.parent_death import die_with
from spmd_rl.rewards.grade import RewardSample, as_grade
from spmd_rl.rewards.rule_table import foreign, is_async, is_batched, preparations, resolve


class Setup(msgspec.Struct, array_like=True):
    rules: list[str]
    sys_path: list[str]
    memory_mib: int
    """0: no limit."""


class Ready(msgspec.Struct, array_like=True):
    error: str | None
    """Why the rules can't be used; None: they can."""
    asynchronous: list[bool] = []
    """By rule."""
    batched: list[bool] = []


class Batch(msgspec.Struct, array_like=True):
    rules: list[int]
    """Positions of the rules to grade by, in this order."""
    ids: list[int]
    samples: list[msgspec.Raw]
    """RewardSamples; one, unless the rule takes several."""
    seconds: float
    """Limit of one call of an asynchronous rule."""


class GradingResult(msgspec.Struct, array_like=True):
    id: int
    rule: int
    seconds: float
    score: float = 0.0
    cause: str | None = None
    extracted: str | None = None
    applies: bool = True
    """False: the rule returned None, so it does not count for this sample."""
    crash: str | None = None
    """Traceback of a rule that raised."""
    unusable: str | None = None
    """The fault of a return value that is no grade; the run has to stop."""
    last: bool = False
    """The process ends after this one: it ran out of memory."""


REQUEST = struct.Struct("<cqd")
"""b"f", 0, 0: fork a grader that talks on the descriptor sent along. b"r", process id, seconds: wait so long for it to
end by itself, then kill it. b"k", process id, 0: it was killed, see that it goes (no reply)."""
REPLY = struct.Struct("<q")
"""Of a fork the process id; of the other the exit code, negative for a signal."""


def frame(message) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def main() -> None:
    die_with(parent=int(sys.argv[1]))
    control = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(control.fileno(), False)
    # What a rule prints goes to stderr.
    os.dup2(2, 1)
    share_terminal()

    setup = msgspec.msgpack.decode(_read_frame(control.fileno()), type=Setup)
    sys.path[:] = setup.sys_path
    try:
        rules = [resolve(name) for name in setup.rules]
        for prepare in preparations(rules):
            prepare()
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        control.sendall(frame(Ready(text)))
        return
    gc.freeze()  # what is here is shared with the graders as long as nobody touches it
    control.sendall(frame(Ready(None, [is_async(rule) for rule in rules], [is_batched(rule) for rule in rules])))
    killed: set[int] = set()
    while (request := _next_request(control, killed)) is not None:
        kind, process, seconds, descriptors = request
        if kind == b"f":
            process = os.fork()
            if process == 0:
                _become_grader(control, descriptors[0], setup, rules)
            os.close(descriptors[0])
            control.sendall(REPLY.pack(process))
        elif kind == b"k":
            killed.add(process)
        else:
            control.sendall(REPLY.pack(_end(process, seconds)))


def _next_request(control: socket.socket, killed: set[int]) -> tuple[bytes, int, float, list[int]] | None:
    while killed:  # a process with much memory takes a while to go, for which nobody waits
        if select.select([control], [], [], 0.02)[0]:
            break
        for process in list(killed):
            if os.waitpid(process, os.WNOHANG)[0]:
                killed.discard(process)
    data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
    while data and len(data) < REQUEST.size:
        data += control.recv(REQUEST.size - len(data))
    return (*REQUEST.unpack(data), descriptors) if data else None


def _end(process: int, patience: float) -> int:
    """Exit code of a grader, which is killed, with all that it started, unless it ends by itself in time."""
    deadline = time.monotonic() + patience
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done or time.monotonic() >= deadline:
            break
        time.sleep(0.005)
    # Its group may hold what it started; while it has not been reaped the group's id can be nobody else's.
    kill_group(process)
    if not done:
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def kill_group(process: int) -> None:
    """SIGKILL to a grader and all that it started."""
    for kill in (os.killpg, os.kill):  # it may not have its own group yet
        with suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


def _become_grader(control: socket.socket, descriptor: int, setup: Setup, rules: list[Callable]) -> None:
    """The forked process's life; it does not return to what the parent was doing."""
    try:
        parent = os.getppid()
        # A session of its own: what a rule starts is killed with it, and Ctrl-C is the pool's to handle.
        os.setsid()
        die_with(parent)
        control.close()
        if setup.memory_mib:
            size = setup.memory_mib << 20
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
        grader = _Grader(descriptor, setup, rules)
        (grader.run_async if is_async(rules[grader.first.rules[0]]) else grader.run)()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class _Grader:
    """One grader process; its first batch says which kind of rules it runs."""

    def __init__(self, descriptor: int, setup: Setup, rules: list[Callable]):
        self.descriptor = descriptor
        self.setup = setup
        self.rules = rules
        self.batched = [is_batched(rule) for rule in rules]
        self.batches = msgspec.msgpack.Decoder(Batch)
        self.samples = msgspec.msgpack.Decoder(RewardSample)
        request = _read_frame(descriptor)
        if not request:
            os._exit(0)
        self.first = self.batches.decode(request)

    def run(self) -> None:
        batch: Batch | None = self.first
        while batch:
            samples = [self.samples.decode(raw) for raw in batch.samples]
            for rule in batch.rules:
                if self.batched[rule]:
                    self._grade_batch(rule, batch.ids, samples)
                else:
                    self._write(self._graded(rule, batch.ids[0], partial(self.rules[rule], samples[0])))
            request = _read_frame(self.descriptor)
            batch = self.batches.decode(request) if request else None

    def _grade_batch(self, rule: int, ids: list[int], samples: list[RewardSample]) -> None:
        called, function = time.perf_counter(), self.rules[rule]
        try:
            values = list(function(samples))
        except BaseException:
            if len(ids) > 1:  # whose fault it was, they say one by one
                for id, sample in zip(ids, samples, strict=True):
                    self._grade_batch(rule, [id], [sample])
            else:
                self._write(self._crashed(rule, ids[0], time.perf_counter() - called))
            return
        for result in self._results(rule, ids, values, time.perf_counter() - called):
            self._write(result)

    def run_async(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=self.descriptor), limit=1 << 20)
        running: set[asyncio.Task] = set()

        async def grade(batch: Batch) -> None:
            for rule in batch.rules:
                for result in await self._await_results(rule, batch):
                    writer.write(frame(result))
                    await writer.drain()
                    if result.last:
                        os._exit(1)

        batch: Batch | None = self.first
        while batch:
            task = asyncio.create_task(grade(batch))
            running.add(task)
            task.add_done_callback(running.discard)
            try:
                size = int.from_bytes(await reader.readexactly(4), "little")
                batch = self.batches.decode(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                batch = None

    async def _await_results(self, rule: int, batch: Batch) -> list[GradingResult]:
        called, function = time.perf_counter(), self.rules[rule]
        samples = [self.samples.decode(raw) for raw in batch.samples]
        try:
            async with asyncio.timeout(batch.seconds) as limit:
                values = list(await function(samples)) if self.batched[rule] else [await function(samples[0])]
        except BaseException:
            seconds = time.perf_counter() - called
            if len(batch.ids) > 1:
                alone = [
                    Batch([rule], [id], [raw], batch.seconds) for id, raw in zip(batch.ids, batch.samples, strict=True)
                ]
                return [result for one in alone for result in await self._await_results(rule, one)]
            if limit.expired():
                return [GradingResult(batch.ids[0], rule, seconds, cause="timeout")]
            return [self._crashed(rule, batch.ids[0], seconds)]
        return self._results(rule, batch.ids, values, time.perf_counter() - called)

    def _graded(self, rule: int, id: int, grade: Callable) -> GradingResult:
        started = time.perf_counter()
        try:
            value = grade()
        except BaseException:  # SystemExit too: a rule does not end the process it shares with others
            return self._crashed(rule, id, time.perf_counter() - started)
        return self._results(rule, [id], [value], time.perf_counter() - started)[0]

    def _results(self, rule: int, ids: list[int], values: list, seconds: float) -> list[GradingResult]:
        name, each = self.setup.rules[rule], seconds / len(ids)
        if len(values) != len(ids):
            return [
                GradingResult(
                    ids[0],
                    rule,
                    seconds,
                    unusable=f"reward.rules: rule {name!r} returned {len(values)} values for {len(ids)} samples; "
                    "a rule that takes a list of samples returns one value for each, in their order",
                )
            ]
        results = []
        for id, value in zip(ids, values, strict=True):
            if value is None:
                results.append(GradingResult(id, rule, each, applies=False))
                continue
            try:
                grade = as_grade(name, value)
            except ValueError as error:
                results.append(GradingResult(id, rule, each, unusable=f"{error}{foreign(self.rules[rule])}"))
            else:
                results.append(GradingResult(id, rule, each, grade.score, grade.cause, grade.extracted))
        return results

    def _crashed(self, rule: int, id: int, seconds: float) -> GradingResult:
        """Return the result of the exception that is being handled."""
        kind, error, _ = sys.exc_info()
        if issubclass(kind, MemoryError):
            error.__traceback__ = None  # it holds what filled the memory
            limit = f"more than reward.memory_mib = {self.setup.memory_mib}" if self.setup.memory_mib else "too much"
            return GradingResult(id, rule, seconds, crash=f"MemoryError: it needs {limit}", last=True)
        return GradingResult(id, rule, seconds, crash=traceback.format_exc().rstrip() + foreign(self.rules[rule]))

    def _write(self, result: GradingResult) -> None:
        view = memoryview(frame(result))
        while view:
            view = view[os.write(self.descriptor, view) :]
        if result.last:
            os._exit(1)


def _read_frame(descriptor: int) -> bytes:
    """The next message, or nothing at the end of the input."""
    header = _read(descriptor, 4)
    return _read(descriptor, int.from_bytes(header, "little")) if len(header) == 4 else b""


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(size - len(data), 1 << 20))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()
