"""What goes into a reward rule and what comes out."""

import math
import numbers
from dataclasses import dataclass, field

CAUSES = ("correct", "wrong", "unparsed", "truncated", "timeout", "crash")


@dataclass(frozen=True)
class RewardSample:
    """All that a rule may look at."""

    prompt: str
    response: str
    answer: str
    finish_reason: str = "stop"
    """Either "stop" or "length" (the response limit cut it off)."""
    row: dict = field(default_factory=dict)
    """The prompt's whole row in the data set."""


@dataclass(frozen=True)
class Grade:
    """A rule's verdict on one sample."""

    score: float
    cause: str | None = None
    """One of CAUSES, or None from a rule that does not judge the answer (format, length)."""
    extracted: str | None = None
    """The answer the rule found in the response."""


def as_grade(rule: str, value) -> Grade:
    """A rule's return value as a Grade with a finite float score; a number, Python's or numpy's, gets no cause."""
    grade = value if isinstance(value, Grade) else Grade(value)
    score = _as_float(grade.score)
    if score is None or not math.isfinite(score):
        raise ValueError(
            f"reward.rules: rule {rule!r} returned {value!r:.200}; a rule returns a finite number or a Grade with one"
        )
    if grade.cause is not None and grade.cause not in CAUSES:
        raise ValueError(
            f"reward.rules: rule {rule!r} returned cause {grade.cause!r}; choose one of {', '.join(CAUSES)}"
        )
    return Grade(score, grade.cause, None if grade.extracted is None else str(grade.extracted))


def _as_float(value) -> float | None:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy's bool is not a numbers.Real
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond 1e308
        return math.inf
