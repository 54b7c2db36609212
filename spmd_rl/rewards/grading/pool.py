"""Grading in processes that can be killed, beside whatever the caller is doing."""

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from spmd_rl.data.tickets import SampleReward
from spmd_rl.distributed.status import current_status, set_status
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.fork_server import ForkServer
from spmd_rl.rewards.grading.grader_process import Batch, GradingResult, frame

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.5
"""A process that closed its end is about to end by itself, and how it did is worth this wait."""
_REPLACING_FRACTION = 0.05
"""Replacing a killed process is on the next sample's clock, up to this part of its time: hangs in a row cost a whole
number of timeouts."""
_SAYING_SECONDS = 0.5
"""Graders that take longer are waited for by name, and so often looked at."""
_LOOP_SECONDS = 1.0
"""Asynchronous rules are stopped by their own event loop; so much later it is taken to be stuck."""


@dataclass
class _Task:
    """A sample on its way through the rules."""

    id: int
    sample: msgspec.Raw
    verdicts: dict[int, GradingResult] = field(default_factory=dict)
    """By rule."""


@dataclass
class _Lane:
    """Rules that are graded by the same processes: all that take one sample at a time, or one of another kind."""

    rules: list[int]
    asynchronous: bool
    capacity: int
    """Samples that one process works on at the same time."""
    waiting: deque[_Task] = field(default_factory=deque)
    alone: deque[_Task] = field(default_factory=deque)
    """One of them, as nobody knows which, had a process killed; they are tried one by one."""

    def left(self, task: _Task) -> list[int]:
        return [rule for rule in self.rules if rule not in task.verdicts]


class GraderPool:
    """Scores samples by weighted rules in processes: `submit` as responses finish, `collect` when convenient.

    Every rule has `timeout_seconds` of wall clock for every sample. One that takes longer has its process killed: it
    scores 0.0 with cause timeout, the sample's other rules and the other samples are graded all the same. A rule that
    raises, ends its process, or needs more than `memory_mib` of memory scores 0.0 with cause crash and is logged the
    first time. A timeout or crash is the sample's cause whatever the other rules say; otherwise that is the first cause
    a rule gives, or correct or wrong by the reward's sign when none does.

    Rules that take one sample are graded by `workers` processes. A rule that takes a list of samples has a process of
    its own, which is given up to `batch` samples a call (the call has `timeout_seconds`); an asynchronous rule has one
    too, which works on up to `batch` samples at once.

    A thread looks after the processes, so limits hold and grading goes on while nobody calls. Raises a ValueError when
    a rule can't be imported (here) or returns something that is no finite number (from `submit` and `collect`).
    """

    def __init__(
        self,
        rules: dict[str, float],
        workers: int = 1,
        timeout_seconds: float = 10.0,
        memory_mib: int = 0,
        batch: int = 64,
    ):
        if not rules:
            raise ValueError(
                "reward.rules = {}: there is nothing to grade by; name at least one rule, as in math_answer: 1.0"
            )
        if workers < 1:
            raise ValueError(f"reward.workers = {workers}: grading needs a process; set it to 1 or more")
        if not timeout_seconds > 0:
            raise ValueError(f"reward.timeout_seconds = {timeout_seconds}: a rule needs time; set it above 0")
        if memory_mib < 0:
            raise ValueError(f"reward.memory_mib = {memory_mib}: set it to 0 (no limit) or more")
        if batch < 1:
            raise ValueError(f"reward.batch = {batch}: a rule is given at least one sample; set it to 1 or more")
        self._names = list(rules)
        self._weights = list(rules.values())
        self._workers_wanted = workers
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._batch = batch

        self._changed = threading.Condition()  # guards all that both threads touch, down to _closing
        self._submitted: deque[_Task] = deque()
        self._scored: list[SampleReward] = []
        self._unscored = 0
        self._busy_seconds = 0.0
        self._failure: Exception | None = None
        self._started = False
        self._closing = False

        # These belong to the thread.
        self._selector = selectors.DefaultSelector()
        self._parent: ForkServer | None = None
        self._lanes: list[_Lane] = []
        self._workers: list[_Worker] = []
        self._spare: tuple[int, socket.socket] | None = None
        self._logged: set[tuple[str, str]] = set()

        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="graders", daemon=True)
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
            self._submitted.append(task)
            self._unscored += 1
        self._wake()

    def collect(self, block: bool) -> list[SampleReward]:
        """The samples scored since the last call, in the order they were done; `block` waits for all submitted."""
        if not block and not self._scored and not self._failure:
            return []
        with self._changed:
            if block:
                self._wait()
            self._check_usable()
            scored, self._scored = self._scored, []
        return scored

    def _wait(self) -> None:
        """Until all are scored; says what is waited for when that takes long."""
        outer = current_status().doing
        while not self._changed.wait_for(
            lambda: self._unscored == 0 or self._failure or self._closing, _SAYING_SECONDS
        ):
            doing = self._oldest() or "graders are being started"
            if current_status().doing != doing:
                set_status(doing=doing)
        if current_status().doing != outer:
            set_status(doing=outer)

    def _oldest(self) -> str:
        """The rule and the sample that a grader has been at for longest, and how many samples are not done."""
        working = [
            (deadline, worker.process, task)
            for worker in list(self._workers)
            for task, deadline in list(worker.tasks.values())
        ]
        if not working:
            return ""
        _, process, task = min(working, key=lambda one: one[0])
        left = [name for rule, name in enumerate(self._names) if rule not in task.verdicts]
        rule = left[0] if left else self._names[-1]
        return f"reward {rule}, sample {task.id}, in process {process}; {self._unscored} samples are not done"

    @property
    def busy_seconds(self) -> float:
        """Seconds spent inside rules so far, summed over processes and, where a rule is asynchronous, over samples."""
        return self._busy_seconds

    @property
    def graders(self) -> dict[int, int]:
        """Process -> how many samples it works on, as far as this thread can see."""
        return {worker.process: len(worker.tasks) for worker in list(self._workers)}

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

    def _run(self) -> None:
        try:
            self._start()
            while not self._closing:
                self._hand_out()
                if self._spare is None:  # it takes the place of the next one that is killed, at once
                    self._spare = self._fork()
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
                worker.close()
            graders = [worker.process for worker in self._workers]
            if self._spare is not None:
                graders.append(self._spare[0])
                self._spare[1].close()
            if self._parent is not None:
                self._parent.close(graders)
            self._selector.close()
            with self._changed:
                self._changed.notify_all()

    def _start(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._parent = ForkServer(self._names, self._timeout_seconds, self._memory_mib)
        ready = self._parent.ready(lambda: self._closing)
        kinds = list(zip(ready.asynchronous, ready.batched, strict=True))
        simple = [rule for rule, kind in enumerate(kinds) if kind == (False, False)]
        if simple:
            self._lanes.append(_Lane(simple, asynchronous=False, capacity=1))
        self._lanes += [
            _Lane([rule], asynchronous, self._batch)
            for rule, (asynchronous, batched) in enumerate(kinds)
            if asynchronous or batched
        ]
        self._batched = ready.batched
        for lane in self._lanes:
            for _ in range(self._workers_wanted if lane.capacity == 1 and lane.rules == simple else 1):
                self._start_worker(lane)
        with self._changed:
            self._started = True
            self._changed.notify_all()

    def _start_worker(self, lane: _Lane) -> None:
        process, connection = self._spare or self._fork()
        self._spare = None
        self._workers.append(_Worker(process, connection, lane, self._selector))

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            return self._parent.fork(theirs), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _replace(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        worker.close()
        if worker.ended:
            ended = self._parent.end(worker.process, _PATIENCE_SECONDS)
        else:
            ended = "was killed"
            self._parent.kill(worker.process)
        self._start_worker(worker.lane)
        return ended

    def _hand_out(self) -> None:
        with self._changed:
            submitted = list(self._submitted)
            self._submitted.clear()
        for lane in self._lanes:
            lane.waiting.extend(submitted)
        for worker in self._workers:
            self._hand_to(worker)

    def _hand_to(self, worker: "_Worker") -> None:
        lane = worker.lane
        if lane.alone:
            if not worker.tasks:
                self._send(worker, [lane.alone.popleft()])
            return
        while lane.waiting and len(worker.tasks) < lane.capacity:
            if self._batched[lane.rules[0]]:  # as many as there are, in one call
                if worker.tasks:
                    return
                self._send(worker, [lane.waiting.popleft() for _ in range(min(lane.capacity, len(lane.waiting)))])
            else:
                self._send(worker, [lane.waiting.popleft()])

    def _send(self, worker: "_Worker", tasks: list[_Task]) -> None:
        deadline = self._deadline(worker.lane)
        late = time.monotonic() - worker.due_since if worker.due_since else 0.0
        deadline -= min(late, _REPLACING_FRACTION * self._timeout_seconds)
        worker.due_since = None
        for task in tasks:
            worker.tasks[task.id] = (task, deadline)
        worker.send(Batch(worker.lane.left(tasks[0]), [t.id for t in tasks], [t.sample for t in tasks]))

    def _deadline(self, lane: _Lane) -> float:
        return time.monotonic() + self._timeout_seconds + (_LOOP_SECONDS if lane.asynchronous else 0.0)

    def _serve(self, worker: "_Worker", events: int) -> None:
        if events & selectors.EVENT_WRITE:
            worker.flush()
        if events & selectors.EVENT_READ:
            self._read(worker)

    def _read(self, worker: "_Worker") -> None:
        for message in worker.receive():
            verdict = msgspec.msgpack.decode(message, type=GradingResult)
            self._take(worker, verdict)
            if verdict.last:
                self._give_up_on(worker)
                return
        if worker.ended:
            self._bury(worker)

    def _take(self, worker: "_Worker", verdict: GradingResult) -> None:
        name = self._names[verdict.rule]
        if verdict.unusable:
            raise ValueError(verdict.unusable)
        if verdict.crash:
            verdict.cause = "crash"
            self._log_once(name, "crash", f"rule {name!r} raised; the sample scores 0.0 by it\n{verdict.crash}")
        elif verdict.cause == "timeout" and worker.lane.asynchronous:
            self._log_timeout(name, verdict.id)
        task, _ = worker.tasks.pop(verdict.id)
        task.verdicts[verdict.rule] = verdict
        if not worker.lane.asynchronous:  # whatever comes next begins now
            deadline = self._deadline(worker.lane)
            if worker.lane.left(task):
                worker.tasks[task.id] = (task, deadline)
            worker.tasks = {id: (other, deadline) for id, (other, _) in worker.tasks.items()}
        self._judged(task, verdict.seconds)

    def _bury(self, worker: "_Worker") -> None:
        """A process ended by itself: out of memory, a crash in C, os._exit."""
        tasks = list(worker.tasks.values())
        ended = self._replace(worker)
        if len(tasks) > 1:
            worker.lane.alone.extend(task for task, _ in tasks)
        for task, deadline in tasks if len(tasks) == 1 else ():
            rule = worker.lane.left(task)[0]
            name = self._names[rule]
            self._log_once(name, "end", f"rule {name!r}: its process {ended}; the sample scores 0.0 by it")
            seconds = max(0.0, time.monotonic() - deadline + self._timeout_seconds)
            self._cut_short(worker.lane, task, GradingResult(task.id, rule, seconds, cause="crash"))

    def _give_up_on(self, worker: "_Worker") -> None:
        """A process that has said its last word is replaced; what it still had to do goes to another."""
        tasks = [task for task, _ in worker.tasks.values()]
        worker.ended = True
        self._replace(worker)
        worker.lane.waiting.extendleft(reversed(tasks))

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers):
            if time.monotonic() < worker.deadline:
                continue
            self._read(worker)  # the verdict may have come while this thread was kept waiting
            if time.monotonic() < worker.deadline or worker not in self._workers:
                continue
            tasks, due = [task for task, _ in worker.tasks.values()], worker.deadline
            self._replace(worker)
            self._workers[-1].due_since = due
            if len(tasks) > 1:
                worker.lane.alone.extend(tasks)
                continue
            rule = worker.lane.left(tasks[0])[0]
            self._log_timeout(self._names[rule], tasks[0].id)
            self._cut_short(
                worker.lane, tasks[0], GradingResult(tasks[0].id, rule, self._timeout_seconds, cause="timeout")
            )

    def _log_timeout(self, name: str, sample: int) -> None:
        self._log_once(
            name,
            "timeout",
            f"rule {name!r} took longer than reward.timeout_seconds = {self._timeout_seconds:g} "
            f"on sample {sample} and was killed; the sample scores 0.0 by it",
        )

    def _cut_short(self, lane: _Lane, task: _Task, verdict: GradingResult) -> None:
        """Give up on a task's current rule, whose process is gone; another process goes on with the next rule."""
        task.verdicts[verdict.rule] = verdict
        if lane.left(task):
            lane.waiting.appendleft(task)
        self._judged(task, verdict.seconds)

    def _judged(self, task: _Task, seconds: float) -> None:
        with self._changed:
            self._busy_seconds += seconds
            if len(task.verdicts) == len(self._names):
                self._scored.append(self._total(task))
                self._unscored -= 1
                if self._unscored == 0:
                    self._changed.notify_all()

    def _total(self, task: _Task) -> SampleReward:
        verdicts = [task.verdicts[rule] for rule in range(len(self._names))]
        reward = sum(weight * verdict.score for weight, verdict in zip(self._weights, verdicts, strict=True))
        judging = [verdict for verdict in verdicts if verdict.cause is not None]
        for grave in ("crash", "timeout"):
            judging.sort(key=lambda verdict: verdict.cause != grave)
        cause = judging[0].cause if judging else ("correct" if reward > 0 else "wrong")
        extracted = judging[0].extracted if judging else None
        scores = {name: verdict.score for name, verdict in zip(self._names, verdicts, strict=True)}
        return SampleReward(task.id, reward, cause, scores, extracted)

    def _log_once(self, rule: str, what: str, text: str) -> None:
        if (rule, what) not in self._logged:
            self._logged.add((rule, what))
            logger.warning("%s", text)

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = min(worker.deadline for worker in self._workers)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


class _Worker:
    """One grader process and the socket to it, which is never waited for."""

    def __init__(self, process: int, connection: socket.socket, lane: _Lane, selector: selectors.BaseSelector):
        self.process = process
        self.lane = lane
        self.tasks: dict[int, tuple[_Task, float]] = {}
        """By sample: what it is working on and when that has to be done."""
        self.ended = False
        self.due_since: float | None = None
        """When the process that it replaces should have been done."""
        self._connection = connection
        connection.setblocking(False)
        self._selector = selector
        self._writing = False
        self._outbox = bytearray()
        self._inbox = bytearray()
        selector.register(connection, selectors.EVENT_READ, self)

    @property
    def deadline(self) -> float:
        return min((deadline for _, deadline in self.tasks.values()), default=math.inf)

    def send(self, message) -> None:
        self._outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        try:
            del self._outbox[: self._connection.send(self._outbox)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outbox.clear()  # it has ended; reading will find that out
        if bool(self._outbox) != self._writing:
            self._writing = bool(self._outbox)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._connection, events, self)

    def receive(self) -> list[bytes]:
        """The messages that have come in whole; sets `ended` when no more will come."""
        while True:
            try:
                chunk = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
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

    def close(self) -> None:
        self._selector.unregister(self._connection)
        self._connection.close()


def _plain(value):
    """numpy's values in the words of msgpack."""
    if type(value).__module__ == "numpy":
        return value.item() if getattr(value, "ndim", None) == 0 else value.tolist()
    raise TypeError(f"its row holds a {type(value).__name__}, which is neither text, number, list nor dict")
