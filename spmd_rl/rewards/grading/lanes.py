"""Samples on their way through the rules, and the queues in which they wait for a process."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl.data.tickets import UNJUDGED, SampleReward
from spmd_rl.rewards.grading.grader_process import GradingResult


@dataclass
class Task:
    """A sample on its way through the rules."""

    id: int
    sample: msgspec.Raw
    results: dict[int, GradingResult] = field(default_factory=dict)
    """By rule."""

    def reward(self, rules: Mapping[str, float]) -> SampleReward:
        """Sum its results, one for each rule, by the rules' weights.

        A rule that returned None is left out. Its cause is crash or timeout where a rule met one, else that of the
        first rule that gives one, else the reward's sign; UNJUDGED where all are left out.
        """
        by_name = {name: self.results[rule] for rule, name in enumerate(rules) if self.results[rule].applies}
        if not by_name:
            return SampleReward(self.id, 0.0, UNJUDGED, {})
        results = list(by_name.values())
        reward = sum(rules[name] * result.score for name, result in by_name.items())
        judging = [result for result in results if result.cause is not None]
        for grave in ("crash", "timeout"):
            judging.sort(key=lambda result: result.cause != grave)
        cause = judging[0].cause if judging else ("correct" if reward > 0 else "wrong")
        extracted = judging[0].extracted if judging else None
        scores = {name: result.score for name, result in by_name.items()}
        return SampleReward(self.id, reward, cause, scores, extracted)


@dataclass
class Lane:
    """Rules that are graded by the same processes: all that take one sample at a time, or one of another kind."""

    rules: list[int]
    processes: int
    capacity: int = 1
    """Samples that one process works on at the same time."""
    asynchronous: bool = False
    batched: bool = False
    """The rule takes a list of samples in one call."""
    waiting: deque[Task] = field(default_factory=deque)
    alone: deque[Task] = field(default_factory=deque)
    """One of them, as nobody knows which, had a process killed; they are tried one by one."""

    def left(self, task: Task) -> list[int]:
        """Return the rules that have not graded it yet."""
        return [rule for rule in self.rules if rule not in task.results]

    def take(self, busy: int) -> list[Task]:
        """Return what a process that works on `busy` samples is given next, all in one call; [] for nothing."""
        if self.alone:
            return [] if busy else [self.alone.popleft()]
        if self.batched:
            return [] if busy else [self.waiting.popleft() for _ in range(min(self.capacity, len(self.waiting)))]
        return [self.waiting.popleft()] if self.waiting and busy < self.capacity else []


def lanes_of(asynchronous: list[bool], batched: list[bool], workers: int, batch: int) -> list[Lane]:
    """Group rules, given by what they are, into lanes; one that is batched or asynchronous has a lane of its own."""
    kinds = list(zip(asynchronous, batched, strict=True))
    simple = [rule for rule, kind in enumerate(kinds) if kind == (False, False)]
    lanes = [Lane(simple, workers)] if simple else []
    return lanes + [Lane([rule], 1, batch, *kind) for rule, kind in enumerate(kinds) if any(kind)]
