"""A run's checkpoints on disk: which are complete and whole, which may go, and how one comes to be.

    checkpoints/
      latest                  name of the newest complete one
      step_000012/            complete: it was written as step_000012.partial, and renamed
        state.json            the step, and all that rank 0 needs to go on
        files.json            size and digest of every other file
        ...                   what the ranks wrote

A directory that is not complete never has a name that is looked for. Rank 0 only; no torch.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import CheckpointConfig
from spmd_rl.data.digests import UNREADABLE

STATE, FILES, LATEST = "state.json", "files.json", "latest"
_NAME = re.compile(r"step_(\d{6,})")
# What a file system wants to keep free beside a checkpoint.
_SPARE_BYTES = 64 << 20

Digests = Callable[[Path, Sequence[str]], Mapping[str, str]]
"""Digests of some files of a directory by name; the ranks may share the work."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    path: Path

    def state(self) -> dict[str, Any]:
        """Return what rank 0 had written down. Raises ValueError that names the file."""
        try:
            found = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / STATE}: can't be read ({error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"{self.path / STATE}: holds {type(found).__name__}, not what a run writes there")
        return found


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory, self.config = Path(directory), config
        self.untidy = ""
        """The error of tidying up after the last one was complete; empty: none."""

    def found(self) -> list[SavedCheckpoint]:
        """All complete ones, oldest first."""
        return [saved for saved in self._named() if os.path.isfile(saved.path / FILES)]

    def _named(self) -> list[SavedCheckpoint]:
        """All that have a complete one's name: something was taken away from those that are not."""
        if not self.directory.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted(
            (SavedCheckpoint(int(name[1]), path) for name, path in named if name), key=lambda saved: saved.step
        )

    def begin(self, step: int, expected_bytes: int) -> Path:
        """An empty directory for a new one.

        What an earlier attempt left unfinished is removed. Raises OSError when there is less room than
        `expected_bytes`: nothing was written then, and what is there stays.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for unfinished in self.directory.glob("step_*.partial"):
            shutil.rmtree(unfinished)
        free = shutil.disk_usage(self.directory).free
        if free < expected_bytes + _SPARE_BYTES:
            raise OSError(
                f"{self.directory}: a checkpoint takes about {_gib(expected_bytes)}, and only {_gib(free)} are free; "
                "make room, or lower checkpoint.keep_last"
            )
        partial = self.directory / f"{_name(step)}.partial"
        partial.mkdir()
        return partial

    def seal(self, step: int, state: Mapping[str, Any]) -> list[str]:
        """The ranks have written: add what rank 0 needs to go on. Returns the names of all files."""
        partial = self.directory / f"{_name(step)}.partial"
        _write(partial / STATE, json.dumps({"step": step, **state}, indent=1))
        return sorted(str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file())

    def complete(self, step: int, digests: Mapping[str, str]) -> SavedCheckpoint:
        """Give a sealed directory its name, and remove what need not be kept. `digests`: of all files in it."""
        partial, path = self.directory / f"{_name(step)}.partial", self.directory / _name(step)
        files = {name: {"bytes": (partial / name).stat().st_size, "digest": found} for name, found in digests.items()}
        files[FILES] = {"bytes": 0, "digest": _own_digest(files)}
        _write(partial / FILES, json.dumps(files, indent=1))
        if path.exists():  # the same step, done again after an older one was taken up
            _remove(path)
        partial.rename(path)
        _sync_directory(self.directory)
        self.untidy = ""
        try:  # it is there, whatever becomes of the rest
            self._tidy(path.name)
        except OSError as error:
            self.untidy = f"{path} is complete, but what it replaces could not all be removed: {error}"
        return SavedCheckpoint(step, path)

    def _tidy(self, newest: str) -> None:
        try:
            self._point_to(newest)
        except OSError:  # for want of room, which older ones take
            self._prune()
            self._point_to(newest)
        else:
            self._prune()

    def _point_to(self, name: str) -> None:
        pointer = self.directory / f"{LATEST}.new"
        _write(pointer, name + "\n")
        pointer.rename(self.directory / LATEST)
        _sync_directory(self.directory)

    def after(self, step: int) -> list[SavedCheckpoint]:
        """Return what is there of later steps, complete or harmed."""
        return [saved for saved in self._named() if saved.step > step]

    def set_aside(self, step: int, target: Path) -> None:
        """Move the checkpoints of steps after this one into another directory: the run goes on from an older one."""
        later = self.after(step)
        for saved in later:
            target.mkdir(parents=True, exist_ok=True)
            shutil.move(saved.path, target / saved.path.name)  # it may be another file system
        if later:
            self._point_to(_name(step))

    def abandon(self, step: int) -> None:
        """Remove a directory that can't be finished."""
        shutil.rmtree(self.directory / f"{_name(step)}.partial", ignore_errors=True)
        (self.directory / f"{LATEST}.new").unlink(missing_ok=True)

    def problems(self, saved: SavedCheckpoint, digests: Digests) -> list[str]:
        """Check a checkpoint's files: missing, of another size, or other bytes than were written."""
        try:
            files = json.loads((saved.path / FILES).read_text(encoding="utf-8"))
            sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
            wanted = {name: str(entry["digest"]) for name, entry in files.items()}
            if wanted.pop(FILES, None) != _own_digest(files):
                raise ValueError("other bytes than were written")
            sizes.pop(FILES)
            if outside := [name for name in sizes if name.startswith("/") or ".." in Path(name).parts]:
                raise ValueError(f"it names {outside[0]}, which is outside of the checkpoint")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{saved.path / FILES}: can't be read ({error})"]
        found, here = [], []
        for name, size in sizes.items():
            file = saved.path / name
            if not os.path.isfile(file):
                found.append(f"{file}: missing")
            elif file.stat().st_size != size:
                found.append(f"{file}: {file.stat().st_size} bytes, {size} were written")
            else:
                here.append(name)
        if not found:
            got = digests(saved.path, here)
            found = [
                f"{saved.path / name}: "
                + (got[name] if got[name].startswith(UNREADABLE) else "other bytes than were written")
                for name in here
                if got[name] != wanted[name]
            ]
        return found

    def newest_whole(self, digests: Digests, before: int | None = None) -> tuple[SavedCheckpoint | None, list[str]]:
        """The newest checkpoint whose files are all as they were written, and what is wrong with newer ones.

        `before`: of those of earlier steps.
        """
        problems: list[str] = []
        for saved in reversed(self._named()):
            if before is not None and saved.step >= before:
                continue
            wrong = self.problems(saved, digests)
            if not wrong:
                return saved, problems
            problems += wrong
        return None, problems

    def _prune(self) -> None:
        found = self.found()
        keep = {saved.step for saved in found[-self.config.keep_last :]}
        if self.config.keep_every:
            keep |= {saved.step for saved in found if saved.step % self.config.keep_every == 0}
        best = self.best(found)
        if best is not None:
            keep.add(best.step)
        for saved in found:
            if saved.step not in keep:
                _remove(saved.path)

    def best(self, found: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The one with the largest (or smallest) value of checkpoint.keep_best; of equals, the earliest."""
        if not self.config.keep_best:
            return None
        metric = self.config.keep_best.removeprefix("-")
        sign = -1.0 if self.config.keep_best.startswith("-") else 1.0
        values = [
            (sign * value, -saved.step, saved) for saved in found if (value := _metric(saved, metric)) is not None
        ]
        return max(values, key=lambda entry: entry[:2])[2] if values else None


def _own_digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the list of files itself."""
    listed = json.dumps({name: files[name] for name in sorted(files) if name != FILES}, sort_keys=True)
    return hashlib.sha256(listed.encode()).hexdigest()


def _metric(saved: SavedCheckpoint, name: str) -> float | None:
    try:
        value = saved.state().get("metrics", {}).get(name)
    except ValueError:  # nobody's best
        return None
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says, if it is one's."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else None


def _remove(path: Path) -> None:
    """Under its own name no more before its files go: a kill in between leaves nothing half removed."""
    going = path.with_name(path.name + ".removed.partial")
    path.rename(going)
    shutil.rmtree(going)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # of a full disk it names no file
        raise OSError(f"{path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
