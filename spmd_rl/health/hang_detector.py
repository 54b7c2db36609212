"""When a run has been still for too long: deadlines, configured or learned from what was seen. Pure."""

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
    """Ranks that give no sign of life."""


@dataclass
class LastSeen:
    """What the clock last saw of a rank."""

    beat: Heartbeat
    at: float
    """When this beat was first seen."""

    def silent_seconds(self, now: float) -> float:
        return now - self.at

    def still_seconds(self, now: float) -> float:
        return self.beat.seconds + now - self.at


class HangDetector:
    """A run hangs when no rank has got on for the deadline of what it is at, or a rank gives no sign of life.

    All ranks do the same verbs: one that is stuck soon keeps all others waiting, so a run in which any rank gets on
    does not hang. Times are of one clock of the caller's, in seconds. `grading_seconds`: a deadline that is not
    configured is never shorter while graders are waited for.
    """

    def __init__(self, config: HangConfig, now: float, grading_seconds: float = 0.0) -> None:
        self.config = config
        self.grading_seconds = grading_seconds
        self.seen: dict[int, LastSeen] = {}
        self.longest: dict[str, float] = {}
        """The longest stillness of the run in each phase that has been left again."""
        self._now = now
        self._phase: str = Phase.START
        self._progress = now
        self._longest_here = 0.0
        self._told: object = None

    def look(self, now: float, beats: Iterable[Heartbeat]) -> None:
        """Take in what the ranks have said last."""
        paused = now - self._now
        if paused > STOPPED_SECONDS:  # it was this process that stood still
            for sight in self.seen.values():
                sight.at += paused
            self._progress += paused
        self._now = now
        moved = False
        for beat in beats:
            before = self.seen.get(beat.rank)
            if before is None or beat.number != before.beat.number:
                moved = moved or before is None or beat.since != before.beat.since
                self.seen[beat.rank] = LastSeen(beat, now)
        if moved:
            self._learn(now)

    def _learn(self, now: float) -> None:
        progress = now - min(sight.still_seconds(now) for sight in self.seen.values())
        self._longest_here = max(self._longest_here, progress - self._progress)
        self._progress = max(self._progress, progress)
        phase = self._main().phase
        if phase != self._phase:
            self.longest[self._phase] = max(self._longest_here, self.longest.get(self._phase, 0.0))
            self._phase, self._longest_here = phase, 0.0
        self._told = None

    def _main(self) -> Heartbeat:
        return self.seen[min(self.seen)].beat

    def deadline(self, phase: str, verb: str = "") -> tuple[float, str]:
        """Seconds, and whose they are and where they come from."""
        for name in (verb, phase):
            if name in self.config.deadline_seconds:
                return self.config.deadline_seconds[name], f"{name} (hang.deadline_seconds)"
        least = max(self.config.minimum_seconds, self.grading_seconds if verb in GRADING else 0.0)
        if phase not in self.longest:
            first = max(self.config.first_seconds, least)
            return first, f"{phase} (hang.first_seconds: it never ended before)"
        learned = self.config.factor * self.longest[phase]
        if learned > least:
            return learned, f"{phase} ({self.config.factor:g} times its longest stillness so far)"
        return least, f"{phase} (hang.minimum_seconds)"

    def expired(self, now: float) -> DeadlineExceeded | None:
        """The deadline that has passed, told once until something changes."""
        if not self.seen:
            return None
        limit = self.config.silent_seconds
        silent = {rank: late for rank, sight in self.seen.items() if (late := sight.silent_seconds(now) - limit) > 0}
        if silent:
            # What else is about to pass the same deadline went with it: a node has many ranks.
            near = {rank for rank, sight in self.seen.items() if sight.silent_seconds(now) > 0.75 * limit}
            ranks = tuple(sorted(near | silent.keys()))
            reason = f"no sign of life from {ranks_named(ranks)} for {limit:g} s (hang.silent_seconds)"
            return self._once(ranks, DeadlineExceeded(reason, max(silent.values()), ranks))
        if any(sight.beat.doing == IDLE for sight in self.seen.values()):
            return None
        still = min(sight.still_seconds(now) for sight in self.seen.values())
        at_work = [sight.beat for sight in self.seen.values() if not sight.beat.doing.startswith(WAITS)]
        phases = {(beat.phase, beat.verb) for beat in at_work or [self._main()]}
        deadline, source = max(self.deadline(*one) for one in phases)
        if still <= deadline:
            return None
        reason = f"no rank has got on for {deadline:g} s, the deadline of {source}"
        return self._once("still", DeadlineExceeded(reason, still - deadline))

    def forget(self) -> None:
        """What `expired` told last could not be said: it tells it again."""
        self._told = None

    def _once(self, what: object, expired: DeadlineExceeded) -> DeadlineExceeded | None:
        if self._told == what:
            return None
        self._told = what
        return expired
