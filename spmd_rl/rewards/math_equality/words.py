"""Answers that are words: a choice's letter, yes and no, names; and the words that change what a number says."""

import re

from spmd_rl.rewards.math_equality.numbers import number_of

TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDY = re.compile(r"[^\W\d_]+(?:[\s\-'’.,!?/()]+[^\W\d_]+)*[.!?)]*")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log exp sqrt lim max min det mod gcd lcm inf".split())
_MARKS = re.compile(r"[*`]+|(?<![\w}])_+|_+(?![\w{\\])|^\s*>\s*|^\s*#+\s")

# What may stand before a choice's letter: `So the correct option is`.
_LEAD = (
    r"(?:(?i:so|thus|hence|therefore|it\s+is|it's|the|my),?\s+)*(?:(?i:correct|right|best|final)\s+)*"
    r"(?:(?i:option|choice|answer|alternative)\s*(?:(?i:is)\b|:)?\s*(?:(?i:option|choice)\s*)?)?"
)
_REASON = (
    r"(?i:because|since|as|so|which|where|it|its|the|this|that|these|those|we|for|i\.e\.|namely|given|due|all|only)\b.*"
)
_RIGHT = r"(?i:is)\s+(?:(?i:the)\s+)?(?i:correct|right|best|true|answer)\b.*"
_CHOICE = re.compile(
    rf"{_LEAD}(?:[(\[]([A-Ja-j])[)\]]|(?<![A-Za-z])([A-J]))(?:\s*|[).:]\)?\s*(?P<after>.*)|(?<=[)\]])\s(?P<text>.*)"
    rf"|\s*[,;]\s*{_REASON}|\s*(?:[–—]|\s-)\s+[^\W\d_]{{2,}}.*|\s+(?i:because|since|as)\b.*|\s+{_RIGHT})",
    re.DOTALL,
)
# After the letter: another letter, or that it is not the one.
_OTHER = re.compile(r"[\s,&/]*(?:(?:and|or)\s+)?[(\[]?[A-J](?:[)\].,:;&/]|\s*$|\s+(?:and|or)\b)|(?:and|or)\b")
_DENIED = re.compile(
    r"\s*(?:is|was|are|can|could|does|isn|doesn|would|must)\b.{0,20}\b(?:not|t|wrong|incorrect|false|out)\b"
)
_BECAUSE = re.compile(r"\s*(?:[,;:.–—-]\s*(?:because|since|as|so)|\s(?:because|since))\s.*", re.DOTALL | re.IGNORECASE)
_SINGLE = re.compile(r"[^\W\d_]+")
_QUALIFIERS = frozenset(
    "more less fewer greater least most than not over under above below plus minus half up between".split()
)
_OF_NUMBERS = _QUALIFIERS | {"and", "or", "to", "until", "through"}


def words(text: str) -> str:
    """`text` without `\\text{}` around its words."""
    return TEXT.sub(r"\1", text).strip()


def choice(text: str) -> str | None:
    """The letter of the one choice that a text names: `(C)`, `C. x = 42`, `Option C`, `C, since the others are odd`."""
    match = _CHOICE.fullmatch(_unmarked(words(text)))
    if match is None:
        return None
    after = match["after"] or match["text"] or ""
    if _OTHER.match(after) or _DENIED.match(after):
        return None
    return (match[1] or match[2]).upper()


def same_choice(a: str, b: str) -> bool | None:
    x = choice(a)
    y = x and choice(b)
    return x == y if x and y else None


def told(gold: str, response: str) -> bool | None:
    """The verdict on a response that marks no answer, where the gold one is a choice or a word: by its last line."""
    line = response.strip().rpartition("\n")[2]
    if (verdict := same_choice(gold, line)) is not None:
        return verdict
    line = words(_unmarked(line)).strip(" .!")
    return True if _SINGLE.fullmatch(words(gold)) and line and same_words(gold, line) else None


def same_words(a: str, b: str) -> bool | None:
    """Words are the same whatever their case, spaces, punctuation and bold face; no algebra makes `cat` of `act`."""
    x, y = words(a), words(b)
    if not (_is_words(x) or x != a) or not _WORDY.fullmatch(x):
        return None
    if not _BECAUSE.search(x):
        y = _unmarked(_BECAUSE.sub("", y))
    if not _WORDY.fullmatch(y):
        return None
    if _letters(x) == _letters(y):
        return len(_letters(x)) > 1 or x == y
    return False if _is_words(x) and _is_words(y) else None


def same_qualifiers(a: str, b: str) -> bool | None:
    """False where words make a number another answer: 12 is not `12 or more`; None leaves it to others."""
    x, y = _content_words(a), _content_words(b)
    if not x and not y:
        return None
    if x & _QUALIFIERS != y & _QUALIFIERS:
        return False if re.search("[0-9]", a) and re.search("[0-9]", b) else None
    one, other = (x, y) if number_of(b) else (y, x)
    numbers = (number_of(a) is None) != (number_of(b) is None)
    return False if numbers and not other & _OF_NUMBERS and one & _OF_NUMBERS else None


def in_order(items: list[str]) -> bool:
    """True for three or more numbers, or words, that are sorted in no way: who wrote them so meant the order."""
    if len(items) < 3:
        return False
    numbers = [number_of(item) for item in items]
    if all(numbers):
        values = [number.value for number in numbers if number]
        keys = [values, [abs(value) for value in values]]
    elif all(re.fullmatch(r"[^\W\d_]+", words(item)) for item in items):
        keys = [[words(item).casefold() for item in items]]
    else:
        return False
    return all(key != sorted(key) and key != sorted(key, reverse=True) for key in keys)


def _content_words(text: str) -> set[str]:
    return set(re.findall(r"(?<![\\A-Za-z])[a-z]{2,}", words(text).lower())) if re.search("[a-z]{2}", text) else set()


def _unmarked(text: str) -> str:
    """Without Markdown's bold, italic, code, quote and heading marks, and without fonts of LaTeX."""
    return _MARKS.sub("", text).strip()


def _is_words(text: str) -> bool:
    parts = re.findall(r"[^\W\d_]+", text)
    return bool(_WORDY.fullmatch(text)) and any(
        (len(p) > 2 or p.lower() == "no") and p not in _FUNCTIONS for p in parts
    )


def _letters(text: str) -> str:
    text = re.sub(r"^(?:the|an|a)\s+", "", text.strip().lower())
    return re.sub(r"[\W_]+", "", text)
