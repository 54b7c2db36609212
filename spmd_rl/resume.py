"""Where a run goes on: found, proved whole and agreed upon by all ranks, before a model is made."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.load import settings
from spmd_rl.config.resume import refused
from spmd_rl.controller.checkpoints import STATE, Checkpoints, Saved, digests_here, step_of
from spmd_rl.controller.run_log import CHECKPOINTS
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.world import World

_EXAMPLE = f"a directory such as runs/mine/{CHECKPOINTS}/step_000012"
_WAY = "name another one, or take checkpoint.resume = never"


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

    try:
        if resume == "auto":
            saved, problems = own.newest_whole(digests)
            notes += [f"checkpoint.resume = auto: passed over, {problem}" for problem in problems]
        else:
            path = Path(resume)
            problems = own.problems(Saved(0, path), digests)
            if problems:
                older, _ = Checkpoints(path.parent, config.checkpoint).newest_whole(digests, step_of(path))
                way = f"; {older.path} is whole" if older is not None else f"; name {_EXAMPLE}, or take auto or never"
                raise ValueError(f"checkpoint.resume = {resume}: " + "; ".join(problems) + way)
            saved = Saved(_read(Saved(0, path), "step", int), path)
    except OSError as error:
        raise ValueError(f"checkpoint.resume = {resume}: {error}") from error
    if saved is not None:
        _read(saved, "loop", dict)
        before = _read(saved, "settings", dict)
    if saved is not None and config.checkpoint.load == "all":
        found = refused(before, settings(config), config.checkpoint.resume_allow)
        if found:
            raise ValueError("\n".join(found))
    return saved, notes


def _read(saved: Saved, name: str, kind: type) -> Any:
    """A part of its state. Raises ValueError that names the file."""
    found = saved.state().get(name)
    if not isinstance(found, kind):
        raise ValueError(f"{saved.path / STATE}: {name} is {found!r}: no run of this program has written it; {_WAY}")
    return found


def _merged(mine: dict[str, str], world: World) -> dict[str, str]:
    return {name: value for part in gather(mine, world.payload) for name, value in part.items()}
