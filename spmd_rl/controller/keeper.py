"""Keeps a run from being lost: saves when due, goes on from what was saved. Rank 0, beside the loop."""

from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.controller.checkpoints import Checkpoints, Saved
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.run_log import RunLog


class Keeper:
    """Saves a run's checkpoints while it goes on.

    `resumed`: the checkpoint that the ranks have loaded. `due`: whether somebody asked for a checkpoint and an end.
    """

    def __init__(self, config: Config, ranks: Ranks, log: RunLog, resumed: Saved | None, asked: Callable[[], bool]):
        self.config, self.ranks, self.log, self.resumed, self.asked = config, ranks, log, resumed, asked
        self.checkpoints = Checkpoints(log.run_dir / "checkpoints", config.checkpoint)
        self._saving: tuple[int, dict[str, Any], float] | None = None

    @property
    def first_step(self) -> int:
        """Steps that are done already."""
        if self.resumed is None or self.config.checkpoint.load == "weights":
            return 0
        return self.resumed.step

    def state(self) -> dict[str, Any]:
        """What was written down with the checkpoint that the run goes on from."""
        return self.resumed.state() if self.resumed is not None and self.first_step else {}

    def after(self, step: int, state: Mapping[str, Any]) -> None:
        """After so many steps: save if it is time. `state`: what rank 0 needs to go on, as JSON."""
        self._finish(wait=False)
        asked = self.asked()
        every = self.config.checkpoint.every_steps
        if asked or every and step % every == 0:
            self._finish(wait=True)  # one at a time
            self._begin(step, state)
        if asked:
            self._finish(wait=True)
            raise Preempted(step)
