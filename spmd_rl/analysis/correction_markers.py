"""Phrases in which a model corrects itself, in English and Chinese."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

LANGUAGES = ("en", "zh")
WEIGHTS = {"admits": 3.0, "redoes": 2.0, "checks": 1.0, "hesitates": 1.0}
"""Weight of a kind of marker. admits: something was wrong; redoes: begins again; checks; hesitates: wait, hmm."""
QUOTED = {"en": 10, "zh": 4}
"""A marker is quoted when the prompt has it too, with so many characters around it being the same."""

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

_PATTERNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("en", "admits"): (
        r"\bi(?:'ve|’ve| have)? (?:made|see) (?:a|an|my|the) (?:\w+ )?(?:mistake|error|slip)",
        r"\bthere(?:'s|’s| is| was) (?:a|an) (?:\w+ )?(?:mistake|error) (?:in|with) (?:my|the above|that)",
        r"\b(?:that|this)(?:'s|’s| is| was| can(?:no|')t be)(?: not| n't)? (?:quite )?"
        r"(?:wrong|incorrect|a mistake|my mistake|(?<=not )(?:right|correct)|(?<=not quite )(?:right|correct))\b",
        r"\b(?:that|this) (?:isn't|isn’t|wasn't|can't be|can’t be|cannot be|doesn't seem|doesn’t seem) (?:quite )?"
        r"(?:right|correct)\b",
        r"\bi (?:was wrong|miscalculated|misread|miscounted|misunderstood|messed up|forgot to|overlooked)\b",
        r"\b(?:my mistake|my bad|scratch that)\b",
        rf"{_BEGINS_LOOSELY}\boops\b",
    ),
    ("en", "redoes"): (
        rf"{_LET_ME}{_REDO}",
        r"\bi (?:should|need to|must|will|'ll|have to) "
        r"(?:re-\w+|recheck|recalculate|recompute|reconsider|rethink|redo)\b",
        r"\bon second thoughts?\b",
        r"\b(?:start over|try again)" + _ENDS,
    ),
    ("en", "checks"): (
        rf"{_LET_ME}(?:double[- ]?check|check|verify|make sure|confirm|review|sanity[- ]check|test (?:this|that))\b",
        r"\b(?:double[- ]check(?:ing)?|sanity check)\b",
    ),
    ("en", "hesitates"): (
        rf"(?:{_BEGINS_LOOSELY}|(?<=,\s))\bwait\b(?:{_ENDS}|(?=\s+(?:a (?:minute|second|moment)|no\b|but|that|"
        r"i\b|if|is|isn't|the (?:question|problem)|let|maybe|actually|what|why|hold)))",
        rf"{_BEGINS_LOOSELY}\bhold on\b",
        r"\bhmm+\b",
        rf"(?:{_BEGINS_LOOSELY}|(?<=wait,\s)|(?<=wait\s))\bactually\b(?=\s*,|,?\s+(?:no|wait|that|it|i|the|we)\b)",
    ),
    ("zh", "admits"): (
        r"不对(?!称|等|应|劲|角|的|齐|外|立|口)(?=\s*[，,。.！!…？?；;：:—\n]|了|，|啊|吧|$|\s)",
        r"(?:我|之前|刚才|前面|上面)[^。！？\n]{0,12}?(?:错了|弄错|搞错|算错|看错|有误|犯了[^。\n]{0,6}错)",
        r"(?:算错了|弄错了|搞错了|看错了|想错了|计算有误|这是错误的|出错了)",
    ),
    ("zh", "redoes"): (
        r"重新(?:再)?(?:计?算|推算|检查|检验|考虑|思考|想|推导|分析|审视|审题|读|看|理解|评估|验证|核对|核算|试|来|做|梳理)",
        r"再(?:仔细)?(?:计?算|想|检查|看|读|验证|核对|试|确认|推导)(?:一(?:遍|次|下)|想|看)",
        r"换(?:一)?(?:个|种)(?:思路|方法|角度|方式)",
    ),
    ("zh", "checks"): (
        r"(?:让我们?|我们?来|我(?:需要|得|要|应该|再)?|先)?(?:再|来|仔细)*(?:检查|验证|核对|检验|验算|确认)(?:一下|一遍|一次)",
        r"让我们?(?:再|来|先|仔细)*(?:检查|验证|核对|检验|验算|确认|想想|看看|想一想|看一看|想一下|看一下)",
    ),
    ("zh", "hesitates"): (
        rf"{_BEGINS_ZH}(?:等等|等一下|等下|且慢|慢着)(?=[，,。.！!…？?—、\s]|不|我|让|这|$)",
        rf"{_BEGINS_ZH}(?:嗯|唔|呃)(?=[，,。.！!…？?—\s])",
    ),
}
_MARKERS = tuple(
    (language, kind, re.compile(pattern, re.IGNORECASE))
    for (language, kind), patterns in _PATTERNS.items()
    for pattern in patterns
)


@dataclass(frozen=True)
class Marker:
    """A phrase of self-correction; `start` and `end` count characters of the text it was found in."""

    kind: Literal["admits", "redoes", "checks", "hesitates"]
    language: str
    text: str
    start: int
    end: int


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
