"""Hold what can be set of checkpoints."""

from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.fields import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: NonNegativeInt = 0
    """Save all that a continuation needs after every so many steps. 0: only on a signal (SIGUSR1)."""
    shared: bool = True
    """All nodes see the same run.dir. False: they share no disk, and each keeps its own ranks' files of a checkpoint
    below its own run.dir. A run that resumes brings them together, for which each node needs room for all of it."""
    keep_last: PositiveInt = 2
    """So many of the newest checkpoints stay."""
    keep_every: NonNegativeInt = 0
    """Those of steps that this divides stay too. 0: none."""
    keep_best: str | None = None
    """The one with the largest value of this metric stays too, such as eval/gsm8k/accuracy; with a minus before the
    name, the smallest."""
    resume: str = "auto"
    """auto: go on from the newest whole checkpoint of this run, if there is one. never: start anew; what was there is
    moved aside. Or the directory of a checkpoint."""
    resume_allow: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's run beside those that always may, such as
    train.learning_rate."""
    load: Literal["all", "weights"] = "all"
    """weights: take only the model's weights from the checkpoint; optimizer, schedule and data begin anew."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When a save fails, as on a full disk: say so and go on with the older checkpoint, or stop."""
