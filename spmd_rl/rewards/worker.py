"""A grader process: reads samples on stdin, writes verdicts on stdout, and is killed when a rule takes too long.

Started by pool.py as `python -m spmd_rl.rewards.worker PARENT_PID`. Messages are msgpack behind their length (4 bytes,
little-endian): a Setup, answered by a Ready; then Jobs, each answered by one Verdict a rule.
"""

import ctypes
import os
import signal
import sys
import time
import traceback

import msgspec

from spmd_rl.rewards.grade import RewardSample, as_grade
from spmd_rl.rewards.table import resolve


class Setup(msgspec.Struct, array_like=True):
    rules: list[str]
    sys_path: list[str]


class Ready(msgspec.Struct, array_like=True):
    error: str | None
    """Why the rules can't be used; None: they can."""


class Job(msgspec.Struct, array_like=True):
    first_rule: int
    """Rules before it have their verdict from a process that did not live to give the rest."""
    sample: msgspec.Raw
    """A RewardSample."""


class Verdict(msgspec.Struct, array_like=True):
    rule: int
    seconds: float
    score: float = 0.0
    cause: str | None = None
    extracted: str | None = None
    crash: str | None = None
    """Traceback of a rule that raised."""
    unusable: str | None = None
    """What is wrong with a return value that is no grade; the run has to stop."""


def frame(message) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def main() -> None:
    _die_with(parent=int(sys.argv[1]))
    # The protocol moves to descriptors of its own: what a rule prints goes to stderr, and it has no stdin to eat from.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    setup = msgspec.msgpack.decode(_read_frame(requests), type=Setup)
    sys.path[:] = setup.sys_path
    try:
        rules = [resolve(name) for name in setup.rules]
        for rule in rules:
            getattr(rule, "prepare", _nothing)()
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        _write(replies, frame(Ready(text)))
        return
    _write(replies, frame(Ready(None)))

    jobs, samples = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Decoder(RewardSample)
    while request := _read_frame(requests):
        job = jobs.decode(request)
        sample = samples.decode(job.sample)
        for position in range(job.first_rule, len(rules)):
            _write(replies, frame(_judge(position, setup.rules[position], rules[position], sample)))


def _judge(position: int, name: str, rule, sample: RewardSample) -> Verdict:
    started = time.perf_counter()
    try:
        value = rule(sample)
    except BaseException:  # SystemExit too: a rule does not end the process it shares with others
        return Verdict(position, time.perf_counter() - started, crash=traceback.format_exc())
    seconds = time.perf_counter() - started
    try:
        grade = as_grade(name, value)
    except ValueError as error:
        return Verdict(position, seconds, unusable=str(error))
    return Verdict(position, seconds, grade.score, grade.cause, grade.extracted)


def _nothing() -> None: ...


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends: a rule stuck in C reads no stdin."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)


def _read_frame(descriptor: int) -> bytes:
    """The next message, or nothing at the end of the input."""
    header = _read(descriptor, 4)
    return _read(descriptor, int.from_bytes(header, "little")) if len(header) == 4 else b""


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
