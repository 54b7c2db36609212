"""Decide when a run hangs: deadlines, configured or learned from what was seen. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from spmd_rl.config.config import HangConfig
from spmd_rl.config.names import Phase, Verb
from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import IDLE, WAITS
from spmd_rl.health.heartbeat import STOPPED_SECONDS, Heartbeat

GRADING = (Verb.REWARDS, Verb.COMPARE_ANSWERS)
"""Verbs that wait for graders."""


@dataclass(frozen=True)
class DeadlineExceeded:
    """A deadline that has passed."""

    reason: str
    late_seconds: float
    """By how much, when it was seen."""
    silent: tuple[int, ...] = ()
    """Ranks that send no heartbeat."""


@dataclass
class LastSeen:
    """A rank's last heartbeat, as the detector knows it."""

    beat: Heartbeat
    at: float
    """When this beat was first seen."""

    def silent_seconds(self, now: float) -> float:
        return now - self.at

    def stalled_seconds(self, now: float) -> float:
        return self.beat.seconds + now - self.at


class HangDetector:
    """A run hangs when no rank makes progress for the deadline of what it is at, or a rank sends no heartbeat.

    All ranks do the same verbs: one that is stuck soon keeps all others waiting, so a run in which any rank makes
    progress does not hang. Times are of one clock of the caller's, in seconds. `grading_seconds`: a deadline that is
    not configured is never shorter while graders are waited for.
    """

    def __init__(self, config: HangConfig, now: float, grading_seconds: float = 0.0) -> None:
        self.config = config
        self.grading_seconds = grading_seconds
        self.seen: dict[int, LastSeen] = {}
        self.longest_stall: dict[str, float] = {}
        """The longest time that the run made no progress in each phase that has been left again."""
        self._now = now
        self._phase: str = Phase.START
        self._progress = now
        self._stall_in_phase = 0.0
        self._reported: object = None

    def observe(self, now: float, beats: Iterable[Heartbeat]) -> None:
        """Take in the last heartbeats of the ranks."""
        paused = now - self._now
        if paused > STOPPED_SECONDS:  # it was this process that stood still
            for last in self.seen.values():
                last.at += paused
            self._progress += paused
        self._now = now
        progressed = False
        for beat in beats:
            before = self.seen.get(beat.rank)
            if before is None or beat.number != before.beat.number:
                progressed = progressed or before is None or beat.since != before.beat.since
                self.seen[beat.rank] = LastSeen(beat, now)
        if progressed:
            self._learn(now)

    def _learn(self, now: float) -> None:
        progress = now - min(last.stalled_seconds(now) for last in self.seen.values())
        self._stall_in_phase = max(self._stall_in_phase, progress - self._progress)
        self._progress = max(self._progress, progress)
        phase = self._lowest().phase
        if phase != self._phase:
            self.longest_stall[self._phase] = max(self._stall_in_phase, self.longest_stall.get(self._phase, 0.0))
            self._phase, self._stall_in_phase = phase, 0.0
        self._reported = None

    def _lowest(self) -> Heartbeat:
        return self.seen[min(self.seen)].beat

    def deadline(self, phase: str, verb: str = "") -> tuple[float, str]:
        """Return seconds, and whose they are and where they come from."""
        for name in (verb, phase):
            if name in self.config.deadline_seconds:
                return self.config.deadline_seconds[name], f"{name} (hang.deadline_seconds)"
        least = max(self.config.minimum_seconds, self.grading_seconds if verb in GRADING else 0.0)
        if phase not in self.longest_stall:
            first = max(self.config.first_seconds, least)
            return first, f"{phase} (hang.first_seconds: it never ended before)"
        learned = self.config.factor * self.longest_stall[phase]
        if learned > least:
            return learned, f"{phase} ({self.config.factor:g} times its longest time without progress so far)"
        return least, f"{phase} (hang.minimum_seconds)"

    def expired(self, now: float) -> DeadlineExceeded | None:
        """Return the deadline that has passed, once until something changes."""
        if not self.seen:
            return None
        limit = self.config.silent_seconds
        silent = {rank: late for rank, last in self.seen.items() if (late := last.silent_seconds(now) - limit) > 0}
        if silent:
            # What else is about to pass the same deadline went with it: a node has many ranks.
            near = {rank for rank, last in self.seen.items() if last.silent_seconds(now) > 0.75 * limit}
            ranks = tuple(sorted(near | silent.keys()))
            reason = f"no heartbeat from {ranks_named(ranks)} for {limit:g} s (hang.silent_seconds)"
            return self._report_once(ranks, DeadlineExceeded(reason, max(silent.values()), ranks))
        if any(last.beat.doing == IDLE for last in self.seen.values()):
            return None
        stalled = min(last.stalled_seconds(now) for last in self.seen.values())
        at_work = [last.beat for last in self.seen.values() if not last.beat.doing.startswith(WAITS)]
        phases = {(beat.phase, beat.verb) for beat in at_work or [self._lowest()]}
        deadline, source = max(self.deadline(*one) for one in phases)
        if stalled <= deadline:
            return None
        reason = f"no rank has made progress for {deadline:g} s, the deadline of {source}"
        return self._report_once("stalled", DeadlineExceeded(reason, stalled - deadline))

    def rearm(self) -> None:
        """Have `expired` return again what could not be reported."""
        self._reported = None

    def _report_once(self, what: object, expired: DeadlineExceeded) -> DeadlineExceeded | None:
        if self._reported == what:
            return None
        self._reported = what
        return expired
