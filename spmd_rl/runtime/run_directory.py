"""Hold a run's directory, and keep a finished run in it from being moved unasked. Both are collective acts."""

import os
import signal
from pathlib import Path

from spmd_rl.config.config import Config
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.world import World
from spmd_rl.errors import ConfigError, Problem, refuse
from spmd_rl.health.hang_exit import to_stderr
from spmd_rl.runlog.run_dir import finished_problem
from spmd_rl.runlog.run_lock import RunLock


def hold(run_dir: Path, world: World) -> RunLock | None:
    """Return rank 0's lock on a run's directory. Raises ConfigError on all ranks where another run holds it."""
    lock, problem = None, None
    if world.rank == 0:
        try:
            lock = RunLock(run_dir, _end)
        except ConfigError as error:
            [problem] = error.problems
    _refuse_together(problem, world)
    return lock


def keep_finished(config: Config, run_dir: Path, world: World) -> None:
    """Raise ConfigError on all ranks where a run that begins anew would move a finished one, and nobody asked for that.

    What an earlier attempt of this launch has left is this run's own.
    """
    problem = None
    if world.rank == 0 and config.checkpoint.resume != "never" and not world.begun():
        problem = finished_problem(run_dir, config.checkpoint.resume)
    _refuse_together(problem, world)


def _refuse_together(problem: Problem | None, world: World) -> None:
    """Raise ConfigError on all ranks for what rank 0 has met."""
    parts = [problem.knob, str(problem.value), problem.met, problem.way] if problem is not None else []
    told = gather(parts, world.payload)[0]
    refuse([Problem(*told)] if told else [])


def _end(why: str) -> None:
    to_stderr(f"\n{why}\n")
    os.kill(os.getpid(), signal.SIGTERM)
