"""Say of a setting, at its field, what numbers it takes and whether a resumed run may change it."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spmd_rl.errors import Problem

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Bounds:
    """Hold the range of a number; every bound is finite, and so is the number."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    note: str = ""
    """Why, or what a special value means."""

    def hold(self, value: float) -> bool:
        return self.gt < value < self.lt and self.ge <= value <= self.le

    def __str__(self) -> str:
        upper = f"at most {self.le:g}" if self.le < math.inf else f"below {self.lt:g}" if self.lt < math.inf else ""
        if self.gt > -math.inf:
            lower = f"above {self.gt:g}"
        else:
            lower = f"at least {self.ge:g}" if upper else f"{self.ge:g} or more"
        return " and ".join(filter(None, (lower, upper))) + (f" ({self.note})" if self.note else "")


PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegativeInt = Annotated[int, Bounds(ge=0)]
PositiveFloat = Annotated[float, Bounds(gt=0)]
NonNegativeFloat = Annotated[float, Bounds(ge=0)]
FiniteFloat = Annotated[float, Bounds()]
Fraction = Annotated[float, Bounds(ge=0, lt=1)]
FromZeroToOne = Annotated[float, Bounds(ge=0, le=1)]
Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
"""Of a learning rate, see algorithms/schedule.py."""


class Resume(Enum):
    """Say whether a run may go on with another value than it began with."""

    FREE = "free"
    FIXED = "fixed"


MayDiffer = Annotated[Kind, Resume.FREE]
"""A setting, or all of a section: where, how fast and how watched a run goes does not change what it computes (beyond
rounding)."""
MustStay = Annotated[Kind, Resume.FIXED]
"""A setting that stays, whatever its section and checkpoint.resume_allow say of all of the section."""

NAME = "NAME"
"""Stands in a setting's name for a name of the user's own: of one of several sections of the same kind."""


def marks(kind: Any, mark: type[Kind]) -> list[Kind]:
    """Return the marks of one class on a type, or on the types inside it."""
    found = [one for one in getattr(kind, "__metadata__", ()) if isinstance(one, mark)]
    return found + [one for inner in get_args(kind) for one in marks(inner, mark)]


def named_section(kind: Any) -> Any:
    """Return the kind of section that a field holds several of, each under a name: dict[str, Section]."""
    inner = get_args(kind)
    return inner[1] if get_origin(kind) is dict and dataclasses.is_dataclass(inner[1]) else None


def knobs(kind: Any, prefix: str = "", extras: bool = False) -> dict[str, Any]:
    """Return dotted name -> type of every setting of a section. `extras`: types with their bounds and marks."""
    found: dict[str, Any] = {}
    marked = get_type_hints(kind, include_extras=True)
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            found |= knobs(inner, f"{prefix}{name}.", extras)
        elif section := named_section(inner):
            found |= knobs(section, f"{prefix}{name}.{NAME}.", extras)
        else:
            found[prefix + name] = marked[name] if extras else inner
    return found


def range_problems(section: Any, prefix: str = "") -> list[Problem]:
    """Return a problem for every number of a section, and of those inside it, that is out of its bounds."""
    problems: list[Problem] = []
    for name, kind in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        for knob, inner in _parts(prefix + name, value):
            if dataclasses.is_dataclass(inner):
                problems += range_problems(inner, f"{knob}.")
            elif inner is not None:
                bounds = (one for one in marks(kind, Bounds) if not one.hold(inner))
                problems += [_range_problem(knob, inner, one) for one in bounds]
    return problems


def _parts(knob: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or the parts of a list or of what has names, each with what to call it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{knob}{'.' if dataclasses.is_dataclass(inner) else ' '}{name}", inner
    elif isinstance(value, tuple):
        yield from ((knob, inner) for inner in value)
    else:
        yield knob, value


def _range_problem(knob: str, value: float, bounds: Bounds) -> Problem:
    if not math.isfinite(value):
        return Problem(knob, value, "not a finite number", "give one")
    return Problem(knob, value, "out of range", f"it must be {bounds}")
