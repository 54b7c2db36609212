"""Samples in which a model corrects itself while it thinks ("aha moments", https://arxiv.org/abs/2501.12948)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.analysis.correction_markers import LANGUAGES, WEIGHTS, Marker, find_markers

SAME_KIND = 3
"""Further markers of a kind count half, and no more than this many in all: a model in a loop has no insights."""
CHANGED, CORRECT = 2.0, 2.0
"""Added where the answer stated before the last marker was given up, and where the final answer is correct."""
AROUND = 140
"""Characters of an excerpt on either side of its marker."""

_OPEN, _CLOSE = "<think>", "</think>"
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?"
_STATED = re.compile(
    r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
    rf"|\banswer\s*(?:is|would be|should be|must be|=|:)\s*(?:\*\*)?\$?({_NUMBER})"
    rf"|答案\s*(?:应该|就)?(?:是|为|[：:])\s*\$?({_NUMBER})"
    rf"|(?:\b(?:so|thus|hence|therefore)\b|所以|因此|于是|故)[^.。\n]{{0,80}}?(?:=|\bis\b|\bare\b|是|为|得到?)\s*\$?({_NUMBER})(?=\s*[.,。，!！\n]|\s*$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Insight:
    """One sample that corrects itself."""

    step: int
    id: int
    index: int | None
    """Row of its prompt in its source, where known."""
    question: str
    reward: float | None
    cause: str | None
    inside_think: bool
    """False: the response has no <think> block, and all of it was searched."""
    markers: tuple[Marker, ...]
    before: str | None
    """The last answer stated before the last marker."""
    after: str | None
    """The final answer."""
    changed: bool
    strength: float
    excerpt: tuple[str, str, str]
    """Text before the strongest marker, the marker, text after it."""


def thinking(response: str, prompt: str = "") -> list[tuple[int, int]]:
    """Return (start, end) of a response's <think> blocks, without the tags; none when it has none.

    A block may be open at the end (cut off), and at the start when the template's prompt opened it.
    """
    spans = []
    at = 0
    inside = prompt.rstrip().endswith(_OPEN) or (
        _CLOSE in response and not -1 < response.find(_OPEN) < response.find(_CLOSE)
    )
    while True:
        if not inside:
            opened = response.find(_OPEN, at)
            if opened < 0:
                return spans
            at = opened + len(_OPEN)
        closed = response.find(_CLOSE, at)
        spans.append((at, len(response) if closed < 0 else closed))
        if closed < 0:
            return spans
        at, inside = closed + len(_CLOSE), False


def insight(sample: Mapping[str, Any], languages: Sequence[str] = LANGUAGES) -> Insight | None:
    """A sample's self-correction, from a line of its run's samples; None when there is none."""
    response, prompt = sample["response"], sample.get("prompt") or ""
    spans = thinking(response, prompt)
    quotable = f"{prompt}\n{sample.get('question') or ''}"
    markers = [
        Marker(m.kind, m.language, m.text, m.start + start, m.end + start)
        for start, end in spans or [(0, len(response))]
        for m in find_markers(response[start:end], quotable, languages)
    ]
    markers = _without_repeats(response, markers)
    if not markers:
        return None
    before = _stated(response[: markers[-1].start])
    after = sample.get("extracted") or _stated(response[markers[-1].end :])
    changed = before is not None and after is not None and _normal(before) != _normal(after)
    return Insight(
        step=sample["step"],
        id=sample.get("id", 0),
        index=sample.get("index"),
        question=sample.get("question") or prompt,
        reward=sample.get("reward"),
        cause=sample.get("cause"),
        inside_think=bool(spans),
        markers=tuple(markers),
        before=before,
        after=after,
        changed=changed,
        strength=_weight(markers) + CHANGED * changed + CORRECT * (sample.get("cause") == "correct"),
        excerpt=_excerpt(response, max(markers, key=lambda m: WEIGHTS[m.kind])),
    )


def ranked(insights: Iterable[Insight]) -> list[Insight]:
    """The strongest first; of equals the earlier."""
    return sorted(insights, key=lambda i: (-i.strength, i.step, i.id))


def frequency(found: Iterable[tuple[int, bool]]) -> dict[int, float]:
    """Step -> fraction of its samples that have a marker, from (step, has one) of each sample."""
    seen: dict[int, list[bool]] = defaultdict(list)
    for step, has in found:
        seen[step].append(has)
    return {step: sum(seen[step]) / len(seen[step]) for step in sorted(seen)}


def _weight(markers: Sequence[Marker]) -> float:
    total = 0.0
    for kind, weight in WEIGHTS.items():
        count = min(sum(marker.kind == kind for marker in markers), SAME_KIND)
        total += weight * (1 + (count - 1) / 2) if count else 0.0
    return total


def _without_repeats(response: str, markers: Sequence[Marker]) -> list[Marker]:
    """A sentence said again word for word counts once."""
    first = {response[m.start : m.end + 20].casefold(): m for m in reversed(markers)}
    return sorted(first.values(), key=lambda m: m.start)


def _stated(text: str) -> str | None:
    """The last answer that a text states as one: boxed, "the answer is", "so ... is 5."; not any number in it."""
    found = None
    for match in _STATED.finditer(text):
        found = next(group for group in match.groups() if group is not None)
    return found.strip() if found else None


def _normal(answer: str) -> str:
    """5, 5.0, $5 and 5,000 / 5000 are the same number."""
    plain = re.sub(r"[\s$,%]|\\text\{[^}]*\}|\\[!,; ]", "", answer).casefold()
    try:
        return repr(float(plain))
    except ValueError:
        return plain


def _excerpt(response: str, marker: Marker) -> tuple[str, str, str]:
    start, end = max(0, marker.start - AROUND), min(len(response), marker.end + AROUND)
    before, after = response[start : marker.start], response[marker.end : end]
    # Not in the middle of a word, where words have spaces between them.
    if start and (cut := re.search(r"^\S{0,20}\s", before)):
        before = before[cut.end() :]
    if end < len(response) and (cut := re.search(r"\s\S{0,20}$", after)):
        after = after[: cut.start()]
    return (
        ("…" if start else "") + before,
        response[marker.start : marker.end],
        after + ("…" if end < len(response) else ""),
    )
