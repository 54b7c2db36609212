"""Grading in processes that can be killed, beside whatever the caller is doing."""

import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spmd_rl.data.tickets import Scored
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.worker import Job, Ready, Setup, Verdict, frame

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""What a grader process may take to import the rules."""

# Not reaped by the look, so that the process id still means this process when its group is killed.
_ENDED = os.WEXITED | os.WNOWAIT | os.WNOHANG
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass
class _Task:
    """A sample on its way through the rules."""

    id: int
    sample: msgspec.Raw
    scores: list[float] = field(default_factory=list)
    causes: list[str | None] = field(default_factory=list)
    extracted: str | None = None


class GraderPool:
    """Scores samples by weighted rules in `workers` processes: `submit` as responses finish, `collect` when convenient.

    Every rule has `timeout_seconds` of wall clock for every sample. One that takes longer has its process killed: it
    scores 0.0 with cause timeout, the sample's other rules and the other samples are graded all the same. A rule that
    raises, or ends its process, scores 0.0 with cause crash and is logged the first time. A timeout or crash is the
    sample's cause whatever the other rules say; otherwise that is the first cause a rule gives, or correct or wrong by
    the reward's sign when none does.

    A thread looks after the processes, so limits hold and grading goes on while nobody calls. Raises a ValueError when
    a rule can't be imported (here) or returns something that is no finite number (from `submit` and `collect`).
    """

    def __init__(self, rules: dict[str, float], workers: int = 1, timeout_seconds: float = 10.0):
        if not rules:
            raise ValueError(
                "reward.rules = {}: there is nothing to grade by; name at least one rule, as in math_answer: 1.0"
            )
        if workers < 1:
            raise ValueError(f"reward.workers = {workers}: grading needs a process; set it to 1 or more")
        if not timeout_seconds > 0:
            raise ValueError(f"reward.timeout_seconds = {timeout_seconds}: a rule needs time; set it above 0")
        self._names = list(rules)
        self._weights = list(rules.values())
        self._timeout_seconds = timeout_seconds

        self._changed = threading.Condition()  # guards all that both threads touch, down to _closing
        self._waiting: deque[_Task] = deque()
        self._scored: list[Scored] = []
        self._unscored = 0
        self._busy_seconds = 0.0
        self._failure: Exception | None = None
        self._started = False
        self._closing = False

        # These belong to the thread.
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._logged: set[tuple[str, str]] = set()

        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, args=(workers,), name="graders", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._failure)
        if self._failure:
            self.close()
            raise self._failure

    def submit(self, id: int, sample: RewardSample) -> None:
        """Have a sample graded; never waits."""
        try:
            task = _Task(id, msgspec.Raw(msgspec.msgpack.encode(sample, enc_hook=_plain)))
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"sample {id} can't be sent to a grader process: {error}; leave that column out"
            ) from error
        with self._changed:
            self._check_usable()
            self._waiting.append(task)
            self._unscored += 1
        self._wake()

    def collect(self, block: bool) -> list[Scored]:
        """The samples scored since the last call, in the order they were done; `block` waits for all submitted."""
        if not block and not self._scored and not self._failure:
            return []
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._unscored == 0 or self._failure or self._closing)
            self._check_usable()
            scored, self._scored = self._scored, []
        return scored

    @property
    def busy_seconds(self) -> float:
        """Seconds spent inside rules so far, summed over processes."""
        return self._busy_seconds

    def close(self) -> None:
        """Kill the processes and wait until they are gone; samples not yet scored are dropped. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor is not None:
                os.close(descriptor)
        self._wake_read = self._wake_write = None

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._failure:
            raise self._failure
        assert not self._closing, "the grader pool is closed"

    def _wake(self) -> None:
        if self._wake_write is not None:
            try:
                os.write(self._wake_write, b"!")
            except BlockingIOError:
                pass  # full of wake-ups already

    # What follows runs in the thread. It also starts the processes, which die with the *thread* that started them.

    def _run(self, workers: int) -> None:
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            for _ in range(workers):
                self._start_worker()
            while not self._closing:
                self._hand_out()
                for key, events in self._selector.select(self._seconds_to_next_deadline()):
                    if key.data is None:
                        os.read(self._wake_read, 4096)
                    elif key.data in self._workers:  # else it was replaced a moment ago
                        self._serve(key.data, events)
                self._enforce_deadlines()
        except Exception as error:
            with self._changed:  # told before the cleaning up, which must not keep a waiting caller from it
                self._failure = error
                self._changed.notify_all()
        finally:
            for worker in self._workers:
                worker.kill()
            self._selector.close()
            with self._changed:
                self._changed.notify_all()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._names, self._selector))

    def _replace(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        ended = worker.kill()
        self._start_worker()
        return ended

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.task is None:
                with self._changed:
                    if not self._waiting:
                        return
                    task = self._waiting.popleft()
                worker.task = task
                worker.deadline = time.monotonic() + self._timeout_seconds
                worker.send(Job(len(task.scores), task.sample))

    def _serve(self, worker: "_Worker", events: int) -> None:
        if events & selectors.EVENT_WRITE:
            worker.flush()
        if events & selectors.EVENT_READ:
            self._read(worker)

    def _read(self, worker: "_Worker") -> None:
        for message in worker.receive():
            if worker.ready:
                self._take(worker, msgspec.msgpack.decode(message, type=Verdict))
            else:
                self._take_ready(worker, msgspec.msgpack.decode(message, type=Ready))
        if worker.ended:
            self._bury(worker)

    def _take_ready(self, worker: "_Worker", ready: Ready) -> None:
        if ready.error:
            raise ValueError(ready.error)
        worker.ready, worker.deadline = True, math.inf
        if all(w.ready for w in self._workers):
            with self._changed:
                self._started = True
                self._changed.notify_all()

    def _take(self, worker: "_Worker", verdict: Verdict) -> None:
        name = self._names[verdict.rule]
        if verdict.unusable:
            raise ValueError(verdict.unusable)
        cause = verdict.cause
        if verdict.crash:
            cause = "crash"
            self._log_once(name, cause, f"rule {name!r} raised; the sample scores 0.0 by it\n{verdict.crash}")
        task = worker.task
        worker.deadline = time.monotonic() + self._timeout_seconds
        if task.extracted is None:
            task.extracted = verdict.extracted
        if len(task.scores) == len(self._names) - 1:
            worker.task, worker.deadline = None, math.inf
        self._judged(task, verdict.score, cause, verdict.seconds)

    def _bury(self, worker: "_Worker") -> None:
        """A process ended by itself: out of memory, a crash in C, os._exit."""
        task = worker.task
        if not worker.ready:
            self._workers.remove(worker)
            raise ValueError(
                f"reward.rules = {self._names}: a grader process {worker.kill()} while it imported them; "
                "its own last words are above"
            )
        ended = self._replace(worker)
        if task is not None:
            name = self._names[len(task.scores)]
            self._log_once(name, "end", f"rule {name!r}: its process {ended}; the sample scores 0.0 by it")
            self._cut_short(task, "crash", time.monotonic() - worker.deadline + self._timeout_seconds)

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers):
            if time.monotonic() < worker.deadline:
                continue
            self._read(worker)  # the verdict may have come while this thread was kept waiting
            if time.monotonic() < worker.deadline or worker not in self._workers:
                continue
            if not worker.ready:
                raise ValueError(
                    f"reward.rules = {self._names}: a grader process was still importing them after "
                    f"{START_SECONDS:.0f} s; a rule's module should do no work when it is imported"
                )
            task = worker.task
            name = self._names[len(task.scores)]
            self._replace(worker)
            self._log_once(
                name,
                "timeout",
                f"rule {name!r} took longer than reward.timeout_seconds = {self._timeout_seconds:g} "
                f"on sample {task.id} and was killed; the sample scores 0.0 by it",
            )
            self._cut_short(task, "timeout", self._timeout_seconds)

    def _cut_short(self, task: _Task, cause: str, seconds: float) -> None:
        """Give up on a task's current rule, whose process is gone; another process goes on with the next rule."""
        self._judged(task, 0.0, cause, seconds)
        if len(task.scores) < len(self._names):
            with self._changed:
                self._waiting.appendleft(task)

    def _judged(self, task: _Task, score: float, cause: str | None, seconds: float) -> None:
        task.scores.append(score)
        task.causes.append(cause)
        with self._changed:
            self._busy_seconds += seconds
            if len(task.scores) == len(self._names):
                self._scored.append(self._total(task))
                self._unscored -= 1
                if self._unscored == 0:
                    self._changed.notify_all()

    def _total(self, task: _Task) -> Scored:
        reward = sum(weight * score for weight, score in zip(self._weights, task.scores, strict=True))
        causes = [cause for cause in task.causes if cause is not None]
        for grave in ("timeout", "crash"):
            if grave in causes:
                causes.insert(0, grave)
                break
        cause = causes[0] if causes else ("correct" if reward > 0 else "wrong")
        return Scored(task.id, reward, cause, dict(zip(self._names, task.scores, strict=True)), task.extracted)

    def _log_once(self, rule: str, what: str, text: str) -> None:
        if (rule, what) not in self._logged:
            self._logged.add((rule, what))
            logger.warning("%s", text)

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = min(worker.deadline for worker in self._workers)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


class _Worker:
    """One grader process and the two pipes to it, neither of which is ever waited for."""

    def __init__(self, rules: list[str], selector: selectors.BaseSelector):
        python_path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spmd_rl.rewards.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A session of its own: what a rule starts is killed with it, and Ctrl-C is the parent's to handle.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        )
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._selector = selector
        selector.register(self._stdout, selectors.EVENT_READ, self)
        self._writing = False
        self._outbox = bytearray()
        self._inbox = bytearray()
        self.task: _Task | None = None
        self.ready = False
        self.ended = False
        self.deadline = time.monotonic() + START_SECONDS
        self.send(Setup(rules, sys.path))

    def send(self, message) -> None:
        self._outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        try:
            del self._outbox[: self._stdin.write(self._outbox) or 0]
        except BrokenPipeError:
            self._outbox.clear()  # it has ended; reading will find that out
        if bool(self._outbox) != self._writing:
            self._writing = bool(self._outbox)
            if self._writing:
                self._selector.register(self._stdin, selectors.EVENT_WRITE, self)
            else:
                self._selector.unregister(self._stdin)

    def receive(self) -> list[bytes]:
        """The messages that have come in whole; sets `ended` when no more will come."""
        while (chunk := self._stdout.read(1 << 16)) is not None:
            if not chunk:
                self.ended = True
                break
            self._inbox += chunk
        messages = []
        while len(self._inbox) >= 4:
            end = 4 + int.from_bytes(self._inbox[:4], "little")
            if len(self._inbox) < end:
                break
            messages.append(bytes(self._inbox[4:end]))
            del self._inbox[:end]
        return messages

    def kill(self) -> str:
        """End the process and everything it started; returns how it ended."""
        if self._writing:
            self._selector.unregister(self._stdin)
        self._selector.unregister(self._stdout)
        # A process that closed its pipe is about to end by itself, and how it did is worth a moment.
        patience = time.monotonic() + (0.5 if self.ended else 0.0)
        while time.monotonic() < patience and not os.waitid(os.P_PID, self._process.pid, _ENDED):
            time.sleep(0.005)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _plain(value):
    """numpy's values in the words of msgpack."""
    if type(value).__module__ == "numpy":
        return value.item() if getattr(value, "ndim", None) == 0 else value.tolist()
    raise TypeError(f"its row holds a {type(value).__name__}, which is neither text, number, list nor dict")
