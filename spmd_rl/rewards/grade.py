"""Input and output of a reward rule."""

import math
import numbers
from dataclasses import dataclass, field

CAUSES = ("correct", "wrong", "unparsed", "truncated", "timeout", "crash")


@dataclass(frozen=True)
class RewardSample:
    """All that a rule may look at."""

    prompt: str
    """The question as the user asked it: the row's text, or the last message of its conversation."""
    response: str
    """Its text; of the special tokens those are left out that begin, end or pad a text."""
    answer: str
    finish_reason: str = "stop"
    """Either "stop" or "length" (the response limit cut it off)."""
    row: dict = field(default_factory=dict)
    """The prompt's whole row in the data set."""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt's tokens as they went to the engine."""
    response_ids: list[int] = field(default_factory=list)
    """The response's tokens, the end token included where it ended with one."""
    response_tokens: int = 0
    """Their number; 0: that of response_ids."""
    response_limit: int = 0
    """Tokens after which a response is cut off; 0: not known."""
    rendered: str = ""
    """The prompt as the model was shown it, with the template and all special tokens."""

    @property
    def opened_response(self) -> str:
        """The response, behind the `<think>` that the chat template may have put at the end of the prompt."""
        return (
            "<think>" + self.response if (self.rendered or self.prompt).rstrip().endswith("<think>") else self.response
        )

    @property
    def tokens(self) -> int:
        """Length of the response in tokens; 0 where neither ids nor a number came with it."""
        return self.response_tokens or len(self.response_ids)


@dataclass(frozen=True)
class Grade:
    """A rule's verdict on one sample."""

    score: float
    cause: str | None = None
    """One of CAUSES, or None from a rule that does not judge the answer (format, length)."""
    extracted: str | None = None
    """The answer the rule found in the response."""

    @property
    def correct(self) -> bool:
        """The answer was judged and is right."""
        return self.cause == "correct"


def as_grade(rule: str, value) -> Grade:
    """A rule's return value as a Grade with a finite float score; a number, Python's or numpy's, gets no cause."""
    grade = value if isinstance(value, Grade) else Grade(value)
    score = _as_float(grade.score)
    if score is None or not math.isfinite(score):
        raise ValueError(
            f"reward.rules: rule {rule!r} returned {value!r:.200}; a rule returns a finite number, a Grade "
            "with one, or None where it does not apply"
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
