"""Fill a directory beside its final name, by several processes, in units that an interrupted run doesn't do again."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_STATE = ".conversion"  # in the unfinished directory: what it is to become, and which units are done
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Unit:
    """A part of the work: `run(name)` writes so many bytes and returns what is to be remembered of it, as JSON."""

    name: str
    bytes: int
    run: Callable[[str], Any]


class Job:
    """The directory `<output>.partial` until it is complete and renamed.

    `plan`: what is made from what, as JSON; an unfinished directory of another plan is started anew. With
    torch.distributed running, all processes make the same Job and call the same methods; the units are shared.
    Raises ValueError when `output` must not be written to.
    """

    def __init__(self, output: Path, plan: dict[str, Any], sources: Sequence[Path], force: bool) -> None:
        self.output = output.absolute()
        self.partial = self.output.with_name(self.output.name + ".partial")
        self._plan = json.loads(json.dumps(plan))
        self._state = self.partial / _STATE
        self.rank, self.processes = rank_and_size()
        check_output(self.output, sources, force)
        if self.partial.exists() and not self._state.is_dir() and any(self.partial.iterdir()):
            raise ValueError(f"{self.partial}: it exists and no conversion made it; remove it, or name another output")

    def run(self, units: Sequence[Unit], prepare: Callable[[], None]) -> dict[str, Any]:
        """Do what isn't done yet; returns what all units left to remember, in their order.

        `prepare` fills a new directory with what the units need; one process calls it.
        """
        self.barrier()
        if self.rank == 0:
            self._begin(units, prepare)
        self.barrier()
        for unit in self._share(units):
            if self._note(unit) is None:
                result = unit.run(unit.name)
                file = self._state / f"{unit.name}.json"
                scratch = file.with_suffix(".tmp")
                scratch.write_text(json.dumps({"result": result}), encoding="utf-8")
                os.replace(scratch, file)
        self.barrier()
        notes = {unit.name: self._note(unit) for unit in units} if self.rank == 0 else {}
        assert all(notes.values()), f"never done: {[name for name, note in notes.items() if note is None]}"
        return {name: note["result"] for name, note in notes.items() if note is not None}

    def done(self, units: Sequence[Unit]) -> tuple[int, int]:
        """Bytes that this process has done already, and its bytes in all."""
        mine = self._share(units)
        resumes = self._resumes()
        done = sum(unit.bytes for unit in mine if resumes and self._note(unit) is not None)
        return done, sum(unit.bytes for unit in mine)

    def finish(self) -> None:
        """Give the complete directory its final name."""
        self.barrier()
        if self.rank == 0:
            replace_directory(self.partial, self.output)
            shutil.rmtree(self.output / _STATE)
        self.barrier()

    def discard(self) -> None:
        """Forget what is done: what was written is wrong."""
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(self.partial)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.processes > 1:
            dist.barrier()

    def _begin(self, units: Sequence[Unit], prepare: Callable[[], None]) -> None:
        resumes = self._resumes()
        if not resumes and self.partial.exists():
            shutil.rmtree(self.partial)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(unit.bytes for unit in units if not resumes or self._note(unit) is None) + _SPARE_BYTES
        free = shutil.disk_usage(self.output.parent).free
        if free < needed:
            raise ValueError(
                f"{self.output.parent}: {needed:,} bytes have to be written and {free:,} are free; make room, or name "
                "an output on another disk"
            )
        if not resumes:
            self._state.mkdir(parents=True)
            prepare()
            (self._state / "plan.json").write_text(json.dumps(self._plan, indent=1), encoding="utf-8")

    def _resumes(self) -> bool:
        try:
            return json.loads((self._state / "plan.json").read_text(encoding="utf-8")) == self._plan
        except (OSError, ValueError):
            return False

    def _note(self, unit: Unit) -> dict[str, Any] | None:
        try:
            return json.loads((self._state / f"{unit.name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _share(self, units: Sequence[Unit]) -> list[Unit]:
        """Return this process's units: about as many bytes as the others'."""
        loads = [0] * self.processes
        mine = []
        for unit in units:
            process = loads.index(min(loads))
            loads[process] += unit.bytes
            if process == self.rank:
                mine.append(unit)
        return mine


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank among those that work together, and how many they are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_output(output: Path, sources: Sequence[Path], force: bool) -> None:
    """Raise ValueError when a directory must not be written to."""
    place = output.resolve()
    for source in sources:
        held = source.resolve()
        if held == place or held.is_relative_to(place) or place.is_relative_to(held):
            raise ValueError(f"output {output}: it is, holds or lies in {source}, the source; name another directory")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not any((output / name).is_file() for name in ("config.json", "metadata.json")):
        raise ValueError(f"output {output}: it exists and is neither a model nor a checkpoint; name another directory")
    if not force:
        raise ValueError(f"output {output}: it isn't empty; name another directory, or replace it with force")


def fingerprint(files: Sequence[Path]) -> dict[str, list[int]]:
    """Return the sizes and times of files, which tell when one was changed."""
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)}


def replace_directory(partial: Path, path: Path) -> None:
    """Rename a complete directory to its final name, in place of what is there."""
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    if old.exists():
        shutil.rmtree(old)
