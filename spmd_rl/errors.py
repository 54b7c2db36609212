"""Say what a user can change."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """Hold one thing that cannot work: the setting, its value, what that met, and the way out."""

    knob: str
    """The setting, as the program at hand calls it: train.steps. Several: parallel.tensor x parallel.pipeline."""
    value: object
    """None: it is not set, or `met` tells it."""
    met: str
    way: str
    where: str = ""
    """Place of the setting: a file, the command line, a setting that names a file."""

    def __str__(self) -> str:
        setting = self.knob if self.value is None else f"{self.knob} = {self.value}"
        said = "; ".join(part for part in (self.met, self.way) if part)
        return ": ".join(part for part in (self.where, setting, said) if part)


class ConfigError(ValueError):
    """Refuse what a user asked for; the message has every problem on a line."""

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise ConfigError where there is a problem."""
    if problems:
        raise ConfigError(*problems)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a word; None: none is."""
    return next(iter(get_close_matches(word, list(known), 1)), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None, most: int = 20) -> str:
    """Return a question for the nearest known name; without one `otherwise`, or the first `most` names."""
    known = list(known)
    if near := nearest(word, known):
        return f"did you mean {near}?"
    if otherwise is not None:
        return otherwise
    return f"there are {', '.join(known[:most])}" + (", ..." if len(known) > most else "")


def name_variable(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Have an error about a file say which variable of the environment names a directory that the file is in."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return
    above = {str(path) for path in (Path(error.filename), *Path(error.filename).parents)} - {"/", "."}
    known = {name: value.rstrip("/") for name, value in environment.items() if name not in ("PWD", "OLDPWD")}
    found = [name for name, value in known.items() if value in above]
    if found:
        name = max(found, key=lambda name: len(known[name]))
        error.strerror = f"{error.strerror} ({name} = {known[name]})"
