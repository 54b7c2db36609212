"""Hold what can be set of profiling."""

from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.fields import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ProfileConfig:
    steps: tuple[PositiveInt, ...] = ()
    """Steps, from 1, that are profiled into profile/ of the run's directory; tools/summarize_trace.py says where their
    time goes, chrome://tracing and Perfetto show them. None: no profile."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks that are. None: all of them."""
    phases: tuple[str, ...] = ()
    """Phases (as in timing/<phase>) that are: --run.profile.phases update rollout. None: all."""
    level: Literal["operators", "shapes", "stacks"] = "operators"
    """shapes: with the sizes of what operators are given. stacks: with the lines of Python too; large."""
    memory: bool = False
    """With what operators allocate."""
