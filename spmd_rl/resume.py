"""Where a run goes on: found, proved whole and agreed upon by all ranks, before a model is made."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from spmd_rl.config.config import Config
from spmd_rl.config.load import settings
from spmd_rl.config.resume import refused
from spmd_rl.controller.checkpoints import Checkpoints, Saved, digests_here
from spmd_rl.controller.run_log import CHECKPOINTS
from spmd_rl.distributed.world import World


def resume_point(config: Config, run_dir: Path, world: World) -> tuple[Saved | None, list[str]]:
    """The checkpoint to go on from, if there is one, and what there is to say about it.

    A collective act: the ranks share the reading of its files. Raises ValueError on all ranks when the checkpoint that
    was named is not whole, or when the run may not go on with these settings.
    """
    resume, notes = config.checkpoint.resume, []
    if resume == "never":
        return None, notes
    own = Checkpoints(run_dir / CHECKPOINTS, config.checkpoint)

    def digests(directory: Path, names: Sequence[str]) -> Mapping[str, str]:
        return _merged(digests_here(directory, list(names)[world.rank :: world.size]), world)

    if resume == "auto":
        saved, problems = own.newest_whole(digests)
        notes += [f"checkpoint.resume = auto: passed over, {problem}" for problem in problems]
    else:
        saved = _named(Path(resume))
        problems = own.problems(saved, digests)
        if problems:
            older, _ = Checkpoints(saved.path.parent, config.checkpoint).newest_whole(digests)
            way = f"; {older.path} is whole" if older is not None else ""
            raise ValueError(f"checkpoint.resume = {resume}: " + "; ".join(problems) + way)
    if saved is not None and config.checkpoint.load == "all":
        found = refused(saved.state()["settings"], settings(config), config.checkpoint.resume_allow)
        if found:
            raise ValueError("\n".join(found))
    return saved, notes


def _named(path: Path) -> Saved:
    try:
        return Saved(int(Saved(0, path).state()["step"]), path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint.resume = {path}: no checkpoint of a run is there ({error}); name a directory such as "
            f"runs/mine/{CHECKPOINTS}/step_000012, or take auto or never"
        ) from error


def _merged(mine: dict[str, str], world: World) -> dict[str, str]:
    everyone: list[dict[str, str]] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, mine, group=world.payload)
    return {name: value for part in everyone for name, value in part.items()}
