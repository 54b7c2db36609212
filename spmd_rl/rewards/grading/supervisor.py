"""Grader processes kept at work and within their limits."""

import logging
import math
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from spmd_rl.rewards.grading.fork_server import ForkServer
from spmd_rl.rewards.grading.grader import Grader
from spmd_rl.rewards.grading.grader_process import GradingResult
from spmd_rl.rewards.grading.lanes import Lane, Task, lanes_of

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 0.5
"""A process that closed its end is about to end by itself, and how it did is worth this wait."""
_REPLACING_FRACTION = 0.05
"""Replacing a killed process is on the next sample's clock, up to this part of its time: hangs in a row cost a whole
number of timeouts."""
_TRIES = 3
"""So many calls after a slow first one may take too long before the rule is taken to be as slow always."""
_LOOP_SECONDS = 1.0
"""Asynchronous rules are stopped by their own event loop; so much later it is taken to be stuck."""


class Supervisor:
    """Hands samples to grader processes, kills those that take too long, and replaces them.

    All but `wake`, `graders` and `oldest` belong to one thread: the processes die with the *thread* that started them.
    `on_result` is called with a sample, which has a new result, and the seconds that took.
    """

    def __init__(
        self,
        rules: list[str],
        workers: int,
        timeout_seconds: float,
        memory_mib: int,
        batch: int,
        first_call_seconds: float,
        on_result: Callable[[Task, float], None],
    ) -> None:
        self._rules = rules
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._first_call_seconds = max(first_call_seconds, timeout_seconds)
        self._loads: dict[int, bool] = {}
        """Rule -> it loads something in its first call in a process, which therefore takes longer than others; False:
        its first call is as quick, or later ones are as slow."""
        self._fast_later: set[int] = set()
        """Rules that answered in time after their first call in a process."""
        self._too_slow: Counter[int] = Counter()
        """By rule: first or second calls in a process that took too long."""
        self._memory_mib = memory_mib
        self._batch = batch
        self._on_result = on_result
        self._fork_server: ForkServer | None = None
        self._lanes: list[Lane] = []
        self._graders: list[Grader] = []
        self._spare: tuple[int, socket.socket] | None = None
        self.failures: dict[str, str] = {}
        """Rule -> what it did the first time that it crashed, took too long, or had its process end."""
        self._logged: set[tuple[str, str]] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    @property
    def graders(self) -> dict[int, int]:
        """Process -> how many samples it works on, as far as the asking thread can see."""
        return {grader.process: len(grader.tasks) for grader in list(self._graders)}

    def oldest(self) -> tuple[int, Task] | None:
        """Return the process that has been at its sample for longest, and the sample."""
        working = [
            (deadline, grader.process, task)
            for grader in list(self._graders)
            for task, deadline in list(grader.tasks.values())
        ]
        return min(working, key=lambda one: one[0])[1:] if working else None

    def wake(self) -> None:
        """Have `work` return soon; any thread may."""
        with suppress(OSError):  # full of wake-ups already, or closed
            self._wake_write.send(b"!")

    def start(self, closing: Callable[[], bool]) -> None:
        """Import the rules and start the processes, unless `closing`; a ValueError says which rule can't be used."""
        self._fork_server = ForkServer(self._rules, self._memory_mib)
        ready = self._fork_server.ready(closing)
        self._lanes = lanes_of(ready.asynchronous, ready.batched, self._workers, self._batch)
        for lane in self._lanes:
            for _ in range(lane.processes):
                self._start_grader(lane)

    def work(self, submitted: list[Task]) -> None:
        """Hand out what was submitted, then wait for a process, a deadline or `wake`, and see to it."""
        for lane in self._lanes:
            lane.waiting.extend(submitted)
        for grader in self._graders:
            self._hand_to(grader)
        if self._spare is None:  # it takes the place of the next one that is killed, at once
            self._spare = self._fork()
        for key, events in self._selector.select(self._seconds_to_next_deadline()):
            if key.data is None:
                self._wake_read.recv(4096)
            elif key.data in self._graders:  # else it was replaced a moment ago
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    self._read(key.data)
        self._enforce_deadlines()

    def close(self) -> None:
        """Kill the processes and wait until they are gone."""
        for grader in self._graders:
            grader.close()
        processes = [grader.process for grader in self._graders]
        if self._spare is not None:
            processes.append(self._spare[0])
            self._spare[1].close()
        if self._fork_server is not None:
            self._fork_server.close(processes)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _start_grader(self, lane: Lane) -> None:
        process, connection = self._spare or self._fork()
        self._spare = None
        self._graders.append(Grader(process, connection, lane, self._selector))

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            return self._fork_server.fork(theirs), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _replace(self, grader: Grader) -> str:
        """Start another in a grader's place; returns how that one ended."""
        self._graders.remove(grader)
        grader.close()
        if grader.ended:
            ended = self._fork_server.end(grader.process, _EXIT_SECONDS)
        else:
            ended = "was killed"
            self._fork_server.kill(grader.process)
        self._start_grader(grader.lane)
        return ended

    def _hand_to(self, grader: Grader) -> None:
        one_by_one = bool(grader.lane.alone)
        while tasks := grader.lane.take(len(grader.tasks)):
            late = time.monotonic() - grader.due_since if grader.due_since else 0.0
            grader.due_since = None
            limit = self._limit(grader, grader.lane.left(tasks[0])[0])
            late = min(late, _REPLACING_FRACTION * self._timeout_seconds)
            grader.give(tasks, self._deadline(grader.lane, limit) - late, limit)
            if one_by_one:
                return

    def _limit(self, grader: Grader, rule: int) -> float:
        """Return how long a call may take: the first of a process may load what the rule needs."""
        first = not grader.answered[rule] and self._loads.get(rule, True)
        return self._first_call_seconds if first else self._timeout_seconds

    def _deadline(self, lane: Lane, limit: float) -> float:
        return time.monotonic() + limit + (_LOOP_SECONDS if lane.asynchronous else 0.0)

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = min(grader.deadline for grader in self._graders)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _read(self, grader: Grader) -> None:
        for message in grader.receive():
            result = msgspec.msgpack.decode(message, type=GradingResult)
            self._take(grader, result)
            if result.last:  # what it still had to do goes to another process
                tasks = [task for task, _ in grader.tasks.values()]
                grader.ended = True
                self._replace(grader)
                grader.lane.waiting.extendleft(reversed(tasks))
                return
        if grader.ended:
            self._bury(grader)

    def _take(self, grader: Grader, result: GradingResult) -> None:
        name = self._rules[result.rule]
        if result.unusable:
            raise ValueError(result.unusable)
        if result.crash:
            result.cause = "crash"
            self._log_once(name, "crash", f"rule {name!r} raised; the sample scores 0.0 by it\n{result.crash}")
        elif result.cause == "timeout" and grader.lane.asynchronous:
            self._log_timeout(name, result.id, self._limit(grader, result.rule))
        task, _ = grader.tasks.pop(result.id)
        task.results[result.rule] = result
        if grader.lane.asynchronous or not grader.tasks:
            self._learn_if_it_loads(grader, result)
        if not grader.lane.asynchronous:  # whatever comes next begins now
            left = grader.lane.left(task)
            grader.begun = grader.begun if grader.tasks else time.monotonic()
            deadline = self._deadline(grader.lane, self._limit(grader, (left or [result.rule])[0]))
            if left:
                grader.tasks[task.id] = (task, deadline)
            grader.tasks = {id: (other, deadline) for id, (other, _) in grader.tasks.items()}
        self._on_result(task, result.seconds)

    def _learn_if_it_loads(self, grader: Grader, result: GradingResult) -> None:
        """Take from a call that has ended whether its rule's first call in a process needs more time."""
        rule = result.rule
        if result.cause == "crash":
            return
        grader.answered[rule] += 1
        if grader.answered[rule] > 1:
            self._fast_later.add(rule)
            return
        slow = time.monotonic() - grader.begun > self._timeout_seconds and result.cause != "timeout"
        if not slow:
            self._loads.setdefault(rule, False)
        elif self._too_slow[rule] < _TRIES:
            self._loads[rule] = True

    def _bury(self, grader: Grader) -> None:
        """Replace a process that ended by itself: out of memory, a crash in C, os._exit."""
        tasks = list(grader.tasks.values())
        ended = self._replace(grader)
        if len(tasks) > 1:
            grader.lane.alone.extend(task for task, _ in tasks)
        elif tasks:
            [(task, _)] = tasks
            rule = grader.lane.left(task)[0]
            name = self._rules[rule]
            self._log_once(name, "end", f"rule {name!r}: its process {ended}; the sample scores 0.0 by it")
            seconds = time.monotonic() - grader.begun
            self._cut_short(grader.lane, task, GradingResult(task.id, rule, seconds, cause="crash"))

    def _enforce_deadlines(self) -> None:
        for grader in list(self._graders):
            if time.monotonic() < grader.deadline:
                continue
            self._read(grader)  # the result may have come while this thread was kept waiting
            if time.monotonic() < grader.deadline or grader not in self._graders:
                continue
            tasks, due = [task for task, _ in grader.tasks.values()], grader.deadline
            self._replace(grader)
            self._graders[-1].due_since = due
            if len(tasks) > 1:
                grader.lane.alone.extend(tasks)
                continue
            [task] = tasks
            rule = grader.lane.left(task)[0]
            limit = self._limit(grader, rule)
            if grader.answered[rule] <= 1 and rule not in self._fast_later:
                # What it may have loaded did not make it fast enough; the sample may be to blame.
                self._too_slow[rule] += 1
                if not self._loads.get(rule) or self._too_slow[rule] == _TRIES:
                    self._loads[rule] = False
            self._log_timeout(self._rules[rule], task.id, limit)
            self._cut_short(grader.lane, task, GradingResult(task.id, rule, limit, cause="timeout"))

    def _cut_short(self, lane: Lane, task: Task, result: GradingResult) -> None:
        """Give up on a task's current rule, whose process is gone; another process goes on with the next rule."""
        task.results[result.rule] = result
        if lane.left(task):
            lane.waiting.appendleft(task)
        self._on_result(task, result.seconds)

    def _log_timeout(self, name: str, sample: int, limit: float) -> None:
        knob = "reward.first_call_seconds" if limit > self._timeout_seconds else "reward.timeout_seconds"
        self._log_once(
            name,
            "timeout",
            f"rule {name!r} took longer than {knob} = {limit:g} "
            f"on sample {sample} and was killed; the sample scores 0.0 by it",
        )

    def _log_once(self, rule: str, what: str, text: str) -> None:
        if (rule, what) not in self._logged:
            self._logged.add((rule, what))
            self.failures.setdefault(rule, text)
            logger.warning("%s", text)
