"""Find where a run goes on: proved whole and agreed upon by all ranks, before a model is made."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.loading import settings
from spmd_rl.config.resume_policy import resume_problems
from spmd_rl.config.reward_config import RewardConfig
from spmd_rl.data.digests import UNREADABLE, digests_of
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.status import set_status
from spmd_rl.distributed.world import World
from spmd_rl.errors import refuse
from spmd_rl.runlog.checkpoint_store import STATE, CheckpointStore, Digests, SavedCheckpoint, name_of, step_of
from spmd_rl.runlog.run_dir import CHECKPOINTS

_EXAMPLE = f"a directory such as runs/mine/{CHECKPOINTS}/step_000012"
_SEEN_SECONDS = 60.0
"""Another node's view of a directory may be so old."""
_WAY = "name another one, or take checkpoint.resume = never"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that the ranks take up."""

    saved: SavedCheckpoint
    only_weights: bool = False
    same_run: bool = False
    """It is one of this run's own: what is in the run's directory goes on."""


def resume_point(config: Config, run_dir: Path, world: World) -> tuple[Resumed | None, list[str]]:
    """The checkpoint to go on from, if there is one, and what there is to say about it.

    A run that was started with the same settings before, and has saved since, goes on from what it has saved, whatever
    checkpoint.resume told it to begin with; with `never` only where torchrun has started the ranks again.

    A collective act: the ranks share the reading of its files. Raises ValueError on all ranks when the checkpoint that
    was named is not whole, when the run may not go on with these settings, or when ranks see different files.
    """
    found, notes, error = None, [], None
    try:
        found, notes = _search(config, run_dir, world)
    except ValueError as raised:
        error = raised
    outcome = f"refuses: {error}" if error else f"takes up {found.saved.path}" if found else "begins anew"
    _same_everywhere(outcome, run_dir, world)
    if error:
        raise error
    return found, notes


def _search(config: Config, run_dir: Path, world: World) -> tuple[Resumed | None, list[str]]:
    resume, load = config.checkpoint.resume, config.checkpoint.load
    own = CheckpointStore(run_dir / CHECKPOINTS, config.checkpoint)
    digests = _shared(run_dir, world)
    notes: list[str] = []
    try:
        notes += _adopt_sealed(own, digests, run_dir, world)
        goes_on = any(_by_this_command(saved, config, world) for saved in own.found()[-1:])
        if goes_on or resume == "auto":
            saved, problems = own.newest_whole(digests)
            notes += [f"checkpoint.resume = {resume}: passed over, {problem}" for problem in problems]
            if saved is not None and resume != "auto":
                notes.append(f"checkpoint.resume = {resume}: so the run began; it goes on from what it has saved since")
            if saved is not None:
                return _checked(Resumed(saved, same_run=True), config), notes
        if resume in ("auto", "never"):
            return None, notes
        path = Path(resume)
        saved = _named(path, digests, config)
    except OSError as error:
        raise ValueError(f"checkpoint.resume = {resume}: {error}") from error
    same_run = path.parent.resolve() == own.directory.resolve()
    if same_run and load == "weights":
        raise ValueError(
            f"checkpoint.load = weights: {path} is of this run itself, whose steps would be counted anew; give the new "
            "run a run.name or run.dir of its own"
        )
    return _checked(Resumed(saved, load == "weights", same_run), config), notes


def _adopt_sealed(own: CheckpointStore, digests: Digests, run_dir: Path, world: World) -> list[str]:
    """Complete what a run had sealed when it died: all ranks have written, only digests and name are missing.

    Returns what there is to say about it.
    """
    notes = []
    for step, names in gather(own.sealed() if world.rank == 0 else {}, world.payload)[0].items():
        partial = own.directory / f"{name_of(step)}.partial"
        found, outcome = digests(partial, names), ""
        if world.rank == 0:
            try:
                if broken := next((f"{name}: {why}" for name, why in found.items() if why.startswith(UNREADABLE)), ""):
                    raise OSError(broken)
                own.adopt(step, found)
            except OSError as error:
                outcome = f"{partial} has all its files, and could not be completed: {error}"
        outcome = gather(outcome, world.payload)[0]
        notes.append(outcome or f"{own.directory / name_of(step)}: all its files were written when the run ended")
        deadline = time.monotonic() + _SEEN_SECONDS
        while not outcome and partial.exists() and time.monotonic() < deadline:  # a file system of several nodes
            time.sleep(0.1)
    return notes


def _by_this_command(saved: SavedCheckpoint, config: Config, world: World) -> bool:
    """Return True for a checkpoint saved by a run that was begun as this one is told to begin."""
    try:
        before, now = _settings(saved), settings(config)
    except ValueError:
        return False
    told = ("checkpoint.resume", "checkpoint.load")
    if any(before.get(name) != now[name] for name in told) or resume_problems(before, now, ()):
        return False
    return config.checkpoint.resume != "never" or world.begun()


def _named(path: Path, digests: Digests, config: Config) -> SavedCheckpoint:
    """The checkpoint in a directory. Raises ValueError when it is not whole."""
    problems = CheckpointStore(path.parent, config.checkpoint).problems(SavedCheckpoint(0, path), digests)
    if problems:
        older, _ = CheckpointStore(path.parent, config.checkpoint).newest_whole(digests, step_of(path))
        way = f"; {older.path} is whole" if older is not None else f"; name {_EXAMPLE}, or take auto or never"
        raise ValueError(f"checkpoint.resume = {path}: " + "; ".join(problems) + way)
    return SavedCheckpoint(_read(SavedCheckpoint(0, path), "step", int), path)


def _checked(found: Resumed, config: Config) -> Resumed:
    """Return what was found, if this run may go on from it."""
    _read(found.saved, "loop", dict)
    before = _settings(found.saved)
    if not found.only_weights:
        refuse(resume_problems(before, settings(config), config.checkpoint.resume_allow))
    return found


def _settings(saved: SavedCheckpoint) -> dict[str, Any]:
    """Return what it was saved with; a setting that there was not yet was as it is by default."""
    by_default = Config(ModelConfig(""), reward=RewardConfig(rules={}))  # rules that were not named were none
    return settings(by_default) | _read(saved, "settings", dict)


def _read(saved: SavedCheckpoint, name: str, kind: type) -> Any:
    """A part of its state. Raises ValueError that names the file."""
    found = saved.state().get(name)
    if not isinstance(found, kind):
        raise ValueError(f"{saved.path / STATE}: {name} is {found!r}: no run of this program has written it; {_WAY}")
    return found


def _shared(run_dir: Path, world: World) -> Digests:
    """Return a function with which all ranks together compute the digests of a directory's files."""

    def digests(directory: Path, names: Sequence[str]) -> Mapping[str, str]:
        _same_everywhere(f"reads {directory} ({len(names)} files)", run_dir, world)
        read = 0

        def heard(size: int) -> None:
            nonlocal read
            read += size
            if read % (16 << 20) < size:
                set_status(doing=f"proves {directory} whole, {read >> 20} MiB")

        mine = digests_of(directory, list(names)[world.rank :: world.size], heard)
        return {name: value for part in gather(mine, world.payload) for name, value in part.items()}

    return digests


def _same_everywhere(said: str, run_dir: Path, world: World) -> None:
    """Raises ValueError on all ranks when they are not about to do the same: it would end in a hang."""
    everyone = gather(said, world.payload)
    first = {words: everyone.index(words) for words in everyone}
    if len(first) > 1:
        told = "; ".join(f"rank {rank} {words}" for words, rank in first.items())
        raise ValueError(
            f"run.dir = {run_dir}: the ranks find different checkpoints ({told}); it must be one directory, which all "
            "nodes see alike; checkpoint.shared = false is for nodes that share no disk"
        )
