"""Samples in which a model corrects itself while it thinks ("aha moments", https://arxiv.org/abs/2501.12948)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

LANGUAGES = ("en", "zh")
WEIGHTS = {"admits": 3.0, "redoes": 2.0, "checks": 1.0, "hesitates": 1.0}
"""How much a kind of marker says. admits: something was wrong; redoes: begins again; checks; hesitates: wait, hmm."""
SAME_KIND = 3
"""Further markers of a kind count half, and no more than this many in all: a model in a loop has no insights."""
CHANGED, CORRECT = 2.0, 2.0
"""What it adds that the answer stated before the last marker was given up, and that the final answer is correct."""
QUOTED = {"en": 10, "zh": 4}
"""A marker is quoted when the prompt has it too, with so many characters around it being the same."""
AROUND = 140
"""Characters of an excerpt on either side of its marker."""

# A marker that is an ordinary word elsewhere ("Tom has to wait", "2, 4, 6, 等等") counts where a sentence begins.
_BEGINS = r"(?:(?<=[.!?;:…\n\"“(>*-])|(?<=[.!?;:…,—-]\s)|(?<=\n\n)|(?<![^\s])(?<=[.!?…]\s\s)|^)"
_BEGINS_LOOSELY = rf"(?:{_BEGINS}\s*(?:(?:but|no|oh|so|and|hmm+|ok|okay|well|ah)[\s,.…!]+)*)"
_ENDS = r"(?=\s*(?:[,.!?…:;—*-]|$))"
_LET_ME = (
    r"\blet(?:'s|’s| me| us)\s+(?:just |quickly |carefully |first |now |actually |try to |go back(?: and)? (?:to )?)*"
)
_REDO = (
    r"(?:re-(?!write|present|state|arrange)\w+|re(?:check|calculat|comput|consider|think|examin|evaluat|read(?!y)|do\b|"
    r"visit|try|verif|start|count|solve|work|trac)\w*|(?:check|count|read|think|look|try|start|do|go through) "
    r"[^.,\n]{0,40}?\b(?:again|once more|over)\b|(?:try|use|think of) (?:another|a different) (?:way|approach|method))"
)
_BEGINS_ZH = (
    r"(?:(?<=[。！？；：…\n.!?;:>])\s*|^\s*|(?<=[，,])\s*(?=\S{1,4}[，,。.！!…—\s]*(?:不|我|让|这|是不是|好像|应该)))"
)

_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("en", "admits", r"\bi(?:'ve|’ve| have)? (?:made|see) (?:a|an|my|the) (?:\w+ )?(?:mistake|error|slip)"),
    (
        "en",
        "admits",
        r"\bthere(?:'s|’s| is| was) (?:a|an) (?:\w+ )?(?:mistake|error) (?:in|with) (?:my|the above|that)",
    ),
    (
        "en",
        "admits",
        r"\b(?:that|this)(?:'s|’s| is| was| can(?:no|')t be)(?: not| n't)? (?:quite )?"
        r"(?:wrong|incorrect|a mistake|my mistake|(?<=not )(?:right|correct)|(?<=not quite )(?:right|correct))\b",
    ),
    (
        "en",
        "admits",
        r"\b(?:that|this) (?:isn't|isn’t|wasn't|can't be|can’t be|cannot be|doesn't seem|doesn’t seem) (?:quite )?"
        r"(?:right|correct)\b",
    ),
    (
        "en",
        "admits",
        r"\bi (?:was wrong|miscalculated|misread|miscounted|misunderstood|messed up|forgot to|overlooked)\b",
    ),
    ("en", "admits", r"\b(?:my mistake|my bad|scratch that)\b"),
    ("en", "admits", rf"{_BEGINS_LOOSELY}\boops\b"),
    ("en", "redoes", rf"{_LET_ME}{_REDO}"),
    (
        "en",
        "redoes",
        r"\bi (?:should|need to|must|will|'ll|have to) "
        r"(?:re-\w+|recheck|recalculate|recompute|reconsider|rethink|redo)\b",
    ),
    ("en", "redoes", r"\bon second thoughts?\b"),
    ("en", "redoes", r"\b(?:start over|try again)" + _ENDS),
    (
        "en",
        "checks",
        rf"{_LET_ME}(?:double[- ]?check|check|verify|make sure|confirm|review|sanity[- ]check|test (?:this|that))\b",
    ),
    ("en", "checks", r"\b(?:double[- ]check(?:ing)?|sanity check)\b"),
    (
        "en",
        "hesitates",
        rf"(?:{_BEGINS_LOOSELY}|(?<=,\s))\bwait\b(?:{_ENDS}|(?=\s+(?:a (?:minute|second|moment)|no\b|but|that|"
        r"i\b|if|is|isn't|the (?:question|problem)|let|maybe|actually|what|why|hold)))",
    ),
    ("en", "hesitates", rf"{_BEGINS_LOOSELY}\bhold on\b"),
    ("en", "hesitates", r"\bhmm+\b"),
    (
        "en",
        "hesitates",
        rf"(?:{_BEGINS_LOOSELY}|(?<=wait,\s)|(?<=wait\s))\bactually\b(?=\s*,|,?\s+(?:no|wait|that|it|i|the|we)\b)",
    ),
    ("zh", "admits", r"不对(?!称|等|应|劲|角|的|齐|外|立|口)(?=\s*[，,。.！!…？?；;：:—\n]|了|，|啊|吧|$|\s)"),
    (
        "zh",
        "admits",
        r"(?:我|之前|刚才|前面|上面)[^。！？\n]{0,12}?(?:错了|弄错|搞错|算错|看错|有误|犯了[^。\n]{0,6}错)",
    ),
    ("zh", "admits", r"(?:算错了|弄错了|搞错了|看错了|想错了|计算有误|这是错误的|出错了)"),
    (
        "zh",
        "redoes",
        r"重新(?:再)?(?:计?算|推算|检查|检验|考虑|思考|想|推导|分析|审视|审题|读|看|理解|评估|验证|核对|核算|试|来|做|梳理)",
    ),
    ("zh", "redoes", r"再(?:仔细)?(?:计?算|想|检查|看|读|验证|核对|试|确认|推导)(?:一(?:遍|次|下)|想|看)"),
    ("zh", "redoes", r"换(?:一)?(?:个|种)(?:思路|方法|角度|方式)"),
    (
        "zh",
        "checks",
        r"(?:让我们?|我们?来|我(?:需要|得|要|应该|再)?|先)?(?:再|来|仔细)*(?:检查|验证|核对|检验|验算|确认)(?:一下|一遍|一次)",
    ),
    (
        "zh",
        "checks",
        r"让我们?(?:再|来|先|仔细)*(?:检查|验证|核对|检验|验算|确认|想想|看看|想一想|看一看|想一下|看一下)",
    ),
    ("zh", "hesitates", rf"{_BEGINS_ZH}(?:等等|等一下|等下|且慢|慢着)(?=[，,。.！!…？?—、\s]|不|我|让|这|$)"),
    ("zh", "hesitates", rf"{_BEGINS_ZH}(?:嗯|唔|呃)(?=[，,。.！!…？?—\s])"),
)
_MARKERS = tuple((lang, kind, re.compile(pattern, re.IGNORECASE)) for lang, kind, pattern in _PATTERNS)

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
class Marker:
    """A phrase of self-correction; `start` and `end` count characters of the text it was found in."""

    kind: Literal["admits", "redoes", "checks", "hesitates"]
    language: str
    text: str
    start: int
    end: int


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
    """What comes before the strongest marker, the marker, what follows."""


def find_markers(text: str, prompt: str = "", languages: Sequence[str] = LANGUAGES) -> list[Marker]:
    """Markers of self-correction in order of appearance, without those that only quote the prompt."""
    found = [
        Marker(kind, language, match[0].strip(), match.end() - len(match[0].lstrip()), match.end())  # type: ignore[arg-type]
        for language, kind, pattern in _MARKERS
        if language in languages
        for match in pattern.finditer(text)
        if match[0].strip()
    ]
    # Of markers that overlap, the one that says most; then the longest.
    kept: list[Marker] = []
    for marker in sorted(found, key=lambda m: (m.start, m.end)):
        if not kept or kept[-1].end <= marker.start:
            kept.append(marker)
        elif (WEIGHTS[marker.kind], len(marker.text)) > (WEIGHTS[kept[-1].kind], len(kept[-1].text)):
            kept[-1] = marker
    folded = _folded(prompt)
    return [marker for marker in kept if not _is_quoted(text, marker, folded)]


def thinking(response: str, prompt: str = "") -> list[tuple[int, int]]:
    """Where a response thinks: (start, end) of its <think> blocks, without the tags; none when it has none.

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


def _is_quoted(text: str, marker: Marker, prompt: str) -> bool:
    """`prompt` is folded."""
    wanted = _folded(marker.text)
    before, after = _folded(text[max(0, marker.start - 40) : marker.start]), _folded(text[marker.end : marker.end + 40])
    at = prompt.find(wanted)
    while at >= 0:
        left = _common(reversed(before), reversed(prompt[max(0, at - 40) : at]))
        right = _common(after, prompt[at + len(wanted) : at + len(wanted) + 40])
        if left + right >= QUOTED[marker.language]:
            return True
        at = prompt.find(wanted, at + 1)
    return False


def _folded(text: str) -> str:
    """Without case, and with single spaces."""
    return re.sub(r"\s+", " ", text.casefold())


def _common(mine: Iterable[str], theirs: Iterable[str]) -> int:
    count = 0
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count


def _stated(text: str) -> str | None:
    """The last answer that a text states as one: boxed, "the answer is", "so ... is 5."; not any number in it."""
    found = None
    for match in _STATED.finditer(text):
        found = next(group for group in match.groups() if group is not None)
    return found.strip() if found else None


def _normal(answer: str) -> str:
    """5, 5.0, $5 and 5,000 / 5000 are spelled alike."""
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
