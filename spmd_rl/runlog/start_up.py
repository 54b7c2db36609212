"""Show on rank 0 what a start is at, from its first second, and say at its end where the time went."""

import time
from collections.abc import Callable

from spmd_rl.config.names import Phase, Verb
from spmd_rl.distributed.status import RankStatus, on_status_change
from spmd_rl.runlog.console import Console

REFRESH = "first refresh"
_PHASES = (
    ("imports ", "imports"),
    ("reads the prompts", "prompts"),
    ("starts the reward workers", "reward workers"),
    ("meets ", "meeting the ranks"),
    ("looks for a checkpoint", "checkpoint"),
    ("builds the model", "model"),
    ("loads ", "weights"),
    ("starts vLLM", "engine"),
    ("plans the refresh", "plan of the refresh"),
)
"""The beginning of a rank's `doing`, and the name of that part of a start."""


class StartUp:
    """Hear of this process' status from now on, up to the end of the first refresh."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.note: Callable[[str], None] = console.line
        """Takes the line at the end."""
        self.seconds: dict[str, float] = {}
        self._phase, self._since, self._done = "", clock(), False
        self._begin("imports")
        on_status_change(self.hear)

    def hear(self, status: RankStatus) -> None:
        """Take a new status. Between two parts that are known the first one goes on."""
        if self._done:
            return
        refreshes = status.verb == Verb.TO_ROLLOUT
        if self._phase == REFRESH and not refreshes:
            self._end()
        elif refreshes:
            self._begin(REFRESH)
        elif status.phase == Phase.START:
            for begins, phase in _PHASES:
                if status.doing.startswith(begins):
                    self._begin(phase)

    def _begin(self, phase: str) -> None:
        if phase != self._phase:
            self._count()
            self._phase = phase
            self.console.starting(phase)

    def _count(self) -> None:
        now = self.clock()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now

    def _end(self) -> None:
        self._count()
        self._done = True
        parts = [f"{phase} {spent:.1f}" for phase, spent in self.seconds.items() if spent >= 0.05]
        self.note(f"started in {sum(self.seconds.values()):.1f} s: {', '.join(parts)}")
