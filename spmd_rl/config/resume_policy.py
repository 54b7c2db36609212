"""Say whether a run may go on with other settings than it began with."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from spmd_rl.config.config import Config
from spmd_rl.config.fields import Resume, marks
from spmd_rl.errors import Problem

_SCHEDULES = ("train.schedule", "critic.schedule")
_WARMUPS = ("train.warmup_fraction", "critic.learning_rate_warmup_fraction")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return dotted name, value before, value now, of the settings that differ; one that is not there is None."""
    names = dict.fromkeys((*before, *now))
    return [(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]


def is_among(name: str, allowed: Sequence[str]) -> bool:
    """Return whether a setting is among these or a part of one, or begins as one that ends in a dot or underscore."""
    return any(name == a or name.startswith(a if a.endswith((".", "_")) else f"{a}.") for a in allowed)


@cache
def marked(mark: Resume) -> tuple[str, ...]:
    """Return the names of the settings that carry a mark, and beginnings of names of the sections that do."""
    return tuple(_marked(Config, mark, ""))


def _marked(kind: type, mark: Resume, prefix: str) -> Iterator[str]:
    marked_types = get_type_hints(kind, include_extras=True)
    for name, inner in get_type_hints(kind).items():
        is_section = dataclasses.is_dataclass(inner)
        if mark in marks(marked_types[name], Resume):
            yield f"{prefix}{name}{'.' if is_section else ''}"
        if is_section:
            yield from _marked(inner, mark, f"{prefix}{name}.")


def resume_problems(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> list[Problem]:
    """Return what keeps a run with settings `now` from going on with the state of one with settings `before`.

    `allowed`: names, or beginnings of names that end in a dot, that may differ beside those that always may.
    """
    found = []
    for name, old, new in changes(before, now):
        # More steps are the same run, longer, as long as the learning rate does not depend on where it ends.
        endless = {now.get(schedule) for schedule in _SCHEDULES} <= {"constant", "inverse_sqrt", None}
        longer = name == "train.steps" and endless and not any(now.get(warmup) for warmup in _WARMUPS)
        may = is_among(name, (*marked(Resume.FREE), *allowed)) and name not in marked(Resume.FIXED)
        if not (may or name in allowed or longer):
            way = "set it back, add it to checkpoint.resume_allow, or begin anew with checkpoint.resume = never"
            found.append(Problem(name, str(new), f"the run to go on with had {old}", way))
    return found
