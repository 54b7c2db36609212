"""Say what a user can change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


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
