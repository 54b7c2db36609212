"""A run's checkpoints on disk: which are complete and whole, which may go, and how one comes to be.

    checkpoints/
      latest                  name of the newest complete one
      step_000012/            complete: it was written as step_000012.partial, and renamed
        state.json            the step, and all that rank 0 needs to go on
        files.json            size and digest of every other file
        ...                   what the ranks wrote

A directory that is not complete never has a name that is looked for. One that is sealed has a files.json already,
without digests, which is written last: all files are there, and only digests and name are missing. No torch.
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
_NEW_FILES = f"{FILES}.new"
_NAME = re.compile(r"step_(\d{6,})")
# What a file system wants to keep free beside a checkpoint.
_SPARE_BYTES = 64 << 20

Digests = Callable[[Path, Sequence[str]], Mapping[str, str]]
"""Digests of some files of a directory by name; the ranks may share the work."""
Elsewhere = Mapping[str, Sequence[int]]
"""Of files on other nodes, by name: bytes, and the number of the node."""
Tell = Callable[[str, dict[str, str]], None]
"""(name of a checkpoint, what rank 0 has written in it by name of file)"""


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
        partial = self.directory / f"{name_of(step)}.partial"
        partial.mkdir()
        return partial

    def seal(self, step: int, state: Mapping[str, object], elsewhere: Elsewhere | None = None) -> list[str]:
        """Add what rank 0 needs to go on, and list the files: all ranks have written. Returns the names of all."""
        partial = self.directory / f"{name_of(step)}.partial"
        _write(partial / STATE, json.dumps({"step": step, **state}, indent=1))
        listed = {name: {"bytes": size, "node": node} for name, (size, node) in (elsewhere or {}).items()}
        listed |= {name: {"bytes": size} for name, size in sizes_of(partial).items()}
        _write(partial / FILES, json.dumps(listed, indent=1))
        return sorted(listed)

    def sealed(self) -> dict[int, list[str]]:
        """Return the steps that a run had sealed when it died, and the names of their files.

        All files are there, in the sizes that were listed when every rank had written, and its JSON can be read.
        """
        found = {}
        for partial in sorted(self.directory.glob("step_*.partial")):
            step = step_of(partial.with_suffix(""))
            if step is not None and not partial.with_suffix("").exists() and (names := _sealed_files(partial, step)):
                found[step] = names
        return found

    def adopt(self, step: int, digests: Mapping[str, str]) -> SavedCheckpoint:
        """Give what a run had sealed when it died its name; nothing else is removed."""
        saved = self._give_name(step, digests)
        if saved.step == max(one.step for one in self.found()):
            self._point_to(saved.path.name)
        return saved

    def complete(self, step: int, digests: Mapping[str, str], tell: Tell = lambda name, texts: None) -> SavedCheckpoint:
        """Give a sealed directory its name, and remove what need not be kept. `digests`: of all files in it.

        `tell`: completes what other nodes have of it, before it has its name here.
        """
        saved, self.untidy = self._give_name(step, digests, tell), ""
        try:  # it is there, whatever becomes of the rest
            self._tidy(saved.path.name)
        except OSError as error:
            self.untidy = f"{saved.path} is complete, but what it replaces could not all be removed: {error}"
        return saved

    def complete_part(self, name: str, texts: Mapping[str, str]) -> None:
        """Give what this node has of a checkpoint its name, beside copies of what rank 0 wrote; then tidy up alike."""
        partial = self.directory / f"{name}.partial"
        for file, text in texts.items():
            _write(partial / file, text)
        self._rename(partial, self.directory / name)
        self._tidy(name)

    def _give_name(
        self, step: int, digests: Mapping[str, str], tell: Tell = lambda name, texts: None
    ) -> SavedCheckpoint:
        partial, path = self.directory / f"{name_of(step)}.partial", self.directory / name_of(step)
        listed = json.loads((partial / FILES).read_text(encoding="utf-8"))
        files = {
            name: {"bytes": (partial / name).stat().st_size, "digest": found}
            if (partial / name).exists() or "node" not in listed.get(name, ())
            else {**listed[name], "digest": found}
            for name, found in digests.items()
        }
        files[FILES] = {"bytes": 0, "digest": _own_digest(files)}
        _write(partial / _NEW_FILES, json.dumps(files, indent=1))
        (partial / _NEW_FILES).rename(partial / FILES)  # at every moment one of them is whole
        tell(path.name, {file: (partial / file).read_text(encoding="utf-8") for file in (STATE, FILES)})
        self._rename(partial, path)
        return SavedCheckpoint(step, path)

    def _rename(self, partial: Path, path: Path) -> None:
        if path.exists():  # the same step, done again after an older one was taken up
            _remove(path)
        partial.rename(path)
        _sync_directory(self.directory)

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
            self._point_to(name_of(step))

    def abandon(self, step: int) -> None:
        """Remove a directory that can't be finished."""
        shutil.rmtree(self.directory / f"{name_of(step)}.partial", ignore_errors=True)
        (self.directory / f"{LATEST}.new").unlink(missing_ok=True)

    def problems(self, saved: SavedCheckpoint, digests: Digests) -> list[str]:
        """Check a checkpoint's files: missing, of another size, or other bytes than were written."""
        try:
            files = listed_files((saved.path / FILES).read_text(encoding="utf-8"))
            sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
            wanted = {name: str(entry["digest"]) for name, entry in files.items()}
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


def listed_files(text: str) -> dict[str, dict[str, Any]]:
    """Return what a files.json lists. Raises ValueError, or another error of reading, where it is not as written."""
    files = json.loads(text)
    if files.get(FILES) != {"bytes": 0, "digest": _own_digest(files)}:
        raise ValueError("other bytes than were written")
    return {name: entry for name, entry in files.items() if name != FILES}


def sizes_of(directory: Path) -> dict[str, int]:
    """Return the size of every file below a directory, but of the list of them."""
    files = (file for file in directory.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(directory)): file.stat().st_size for file in files}
    return {name: size for name, size in sizes.items() if name not in (FILES, _NEW_FILES)}


def _sealed_files(partial: Path, step: int) -> list[str]:
    """Return the names of a sealed directory's files; [] where it is not sealed, or not all are as they were then."""
    try:
        listed = {name: entry["bytes"] for name, entry in json.loads((partial / FILES).read_text("utf-8")).items()}
        listed.pop(FILES, None)  # it had its digests already
        whole = bool(listed) and listed == sizes_of(partial)
        states = {name: json.loads((partial / name).read_text("utf-8")) for name in listed if name.endswith(".json")}
        return sorted(listed) if whole and states[STATE]["step"] == step else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


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


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
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
