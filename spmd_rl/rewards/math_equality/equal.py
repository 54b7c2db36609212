"""Are two written answers the same answer?

Numbers, words, choices and lists are compared right here, exactly; everything else goes to math-verify
(https://github.com/huggingface/Math-Verify), which is imported when first needed. Its own time limits are signals, and
are off: the process that runs this is killed instead (pool.py).
"""

import logging
import math
import re
from fractions import Fraction
from functools import cache, lru_cache

from spmd_rl.rewards.math_equality.numbers import Value, number_of, read_number, same_number

ROUNDED_DIGITS = 4
"""A decimal of so many significant digits stands for the exact value that it is the rounded value of (2.6667: 8/3)."""
LONGER = 10
"""Text so many times as long as the gold answer (and 100 characters) is not the answer."""
_LEAF_CHARACTERS = 400
"""Longer texts are not taken apart: their parts would each be given to math-verify."""
_ITEMS = 40
"""Longer lists are left to math-verify whole."""


def equal(gold: str, found: str) -> bool:
    """Return True where `found` says what `gold` says; both as written, in LaTeX or not, with or without delimiters.

    Lists without brackets, and sets, have no order; tuples, intervals and matrices do. A fraction has to be in lowest
    terms where the gold one is (as prm800k has it). Raises nothing; may take for ever, as sympy may.
    """
    if gold == found:
        return True
    if len(found) > LONGER * (100 + len(gold)):
        return False
    a, b = clean(gold), clean(found)
    if not a or not b:
        return False
    if a == b or _squeezed(a) == _squeezed(b) or _squeezed(_words(a)) == _squeezed(_words(b)):
        return True
    decided = _decide(a, b)
    if decided is None:
        decided = _by_math_verify(gold, found) or ((a, b) != (gold, found) and _by_math_verify(a, b))
        decided = decided or _rounds_to(a, b) or _rounds_to(b, a)
    return decided


def _decide(a: str, b: str) -> bool | None:
    """The verdict where plain reading gives one, None where it takes algebra."""
    for judge in (_same_numbers, _same_base, _same_time, _same_choice, _same_parts, _same_words):
        verdict = judge(a, b)
        if verdict is not None:
            return verdict
    return None


# ---- spelling

_TOKENS = re.compile(r"<\|[a-z_]+\|>|</s>")
_DELIMITED = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:boxed|fbox)\s*\{(.+)\}", re.DOTALL)
_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "°": "",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "\u00a0": " ",
        "\u202f": " ",
        "，": ",",
        "。": ".",
        "：": ":",
        "（": "(",
        "）": ")",
        "％": "%",
    }
)
_ROOT = re.compile(r"√\s*(\([^()]*\)|[0-9]+(?:\.[0-9]+)?|[A-Za-z])")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\m?(?:left|right)(?=\s*(?:[()\[\]|./<>]|\\[{}|]|\\[lr](?:brace|brack|angle|vert|floor|ceil)))", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?<=[0-9])(?:\\[,;:! ]|~)\s*(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<=[0-9])(?:\{,\}(?:\\!)?|,\\!|,\\,)\s*(?=[0-9]{3})", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\(?:display|text)style(?![a-z])|\\(?:big|Big)[lr]?(?![a-z])", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-z])", ""),
        (r"\\text(?:normal|rm|it|bf|sf|tt)|\\mbox|\\mathrm|\\mathbf|\\mathit|\\operatorname|\\textup", r"\\text"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\}\s+\{", "}{"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\lbrace(?![a-z])", r"\\{"),
        (r"\\rbrace(?![a-z])", r"\\}"),
        (r"\\le(?![a-zA-Z])", r"\\leq"),
        (r"\\ge(?![a-zA-Z])", r"\\geq"),
        (r"\\ne(?![a-zA-Z])", r"\\neq"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\s+", " "),
    ]
]
_APPROXIMATELY = re.compile(r"\\approx(?![a-z])|\\simeq(?![a-z])|\\doteq(?![a-z])")
_DESCENDING = re.compile(r"([^<>=,;]+?)\s*(>|\\geq(?![a-zA-Z]))\s*([^<>=,;]+?)\s*(>|\\geq(?![a-zA-Z]))\s*([^<>=,;]+)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")


@lru_cache(maxsize=1024)
def clean(text: str) -> str:
    """One spelling for what is written the same: delimiters, spacing, fonts, degrees and approximations gone."""
    text = _TOKENS.sub("", text).translate(_UNICODE).strip()
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1].strip('()')}}}", text)
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    for _ in range(4):
        text = text.strip().rstrip(".,;:").strip()
        match = _DELIMITED.fullmatch(text)
        inner = next(filter(None, match.groups()), None) if match else None
        if inner is None or not _balanced(inner) or re.search(r"\\[\])]|\$", inner):
            break
        text = inner
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<![\\ ])\\+$", "", text.strip()).strip().strip("*")
    if match := _DESCENDING.fullmatch(text):
        turn = {">": "<", r"\geq": r"\leq"}
        text = f"{match[5]} {turn[match[4]]} {match[3]} {turn[match[2]]} {match[1]}"
    whole = _TEXT.fullmatch(text)
    text = whole[1].strip() if whole else text
    return _exact(text).rstrip(".,;: ").strip()


def _exact(text: str) -> str:
    """Of `x = 1/3 \\approx 0.33` the exact side; of `x \\approx 11` the value."""
    left, sign, right = (
        (text, "", "") if not (m := _APPROXIMATELY.search(text)) else (text[: m.start()], m[0], text[m.end() :])
    )
    if not sign:
        return text
    name = re.fullmatch(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?\s*", left)
    return right.strip() if name or not left.strip() else left.strip()


def _balanced(text: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _squeezed(text: str) -> str:
    """Without white space, except where it ends the name of a command: `\\pi x` is not `\\pix`."""
    return re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s+", lambda m: f"{m[1]} " if m[1] else "", text)


# ---- numbers


def same_value(gold: Value, found: Value) -> bool:
    """Equal numbers; 28% is 28 as well as 0.28; a decimal may be the exact value rounded."""
    if gold.percent != found.percent:
        percent, other = (gold, found) if gold.percent else (found, gold)
        return same_number(percent.value, other.value) or same_number(percent.value / 100, other.value)
    if gold.fraction and found.fraction and math.gcd(*gold.fraction) == 1 < math.gcd(*found.fraction):
        return False
    return same_number(gold.value, found.value) or _rounded(gold, found) or _rounded(found, gold)


def _rounded(decimal: Value, exact: Value) -> bool:
    if decimal.decimals is None or exact.decimals is not None or exact.value.denominator == 1:
        return False
    return decimal.digits >= ROUNDED_DIGITS and 2 * abs(decimal.value - exact.value) * 10**decimal.decimals <= 1


def _same_numbers(a: str, b: str) -> bool | None:
    x, y = number_of(a), number_of(b)
    if x is None or y is None:
        return None
    if same_value(x, y):
        return True
    # 1,2 may be a list too, whose order does not matter.
    return None if re.search(r"[0-9],[0-9]", a) and re.search(r"[0-9],[0-9]", b) else False


_BASE = re.compile(r"([0-9A-Z]+)_\{?([0-9]{1,2})\}?")


def _same_base(a: str, b: str) -> bool | None:
    """1010_2 is 1010 where the base goes without saying."""
    x, y = _BASE.fullmatch(_squeezed(a)), _BASE.fullmatch(_squeezed(b))
    if x and y:
        return x.groups() == y.groups()
    if x or y:
        plain = b if x else a
        return True if (x or y)[1] == _squeezed(plain) else None
    return None


_HALF_OF_DAY = re.compile(r"[0-9\s]([ap])\.?\s?m\b\.?", re.IGNORECASE)


def _same_time(a: str, b: str) -> bool | None:
    """12:47 PM is not 12:47 AM; units are left out elsewhere."""
    a, b = _words(a), _words(b)
    x, y = _HALF_OF_DAY.search(a), _HALF_OF_DAY.search(b)
    if x is None or y is None:
        return None
    return [re.sub(r"[\s.]", "", t.lower()) for t in (a, b)][0] == re.sub(r"[\s.]", "", b.lower())


# ---- words

_CHOICE = re.compile(r"\(([A-J])\)(?:\s.*)?|([A-J])(?:[).:](?:\s.*)?|\s+(?:because|since|as)\s.*|\s*)", re.DOTALL)
_WORDY = re.compile(r"[^\W\d_]+(?:[\s\-'’.,!?/()]+[^\W\d_]+)*[.!?)]*")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log exp sqrt lim max min det mod gcd lcm inf".split())


def _words(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip()


def _same_choice(a: str, b: str) -> bool | None:
    """(C), C. and `C. x = 42` are the same choice."""
    x, y = (_CHOICE.fullmatch(_words(text)) for text in (a, b))
    if x is None or y is None:
        return None
    return True if (x[1] or x[2]) == (y[1] or y[2]) else False


def _same_words(a: str, b: str) -> bool | None:
    """Words are the same whatever their case, spaces and punctuation; no algebra makes `cat` of `act`."""
    x, y = _words(a), _words(b)
    if not (_is_words(x) or x != a) or not _WORDY.fullmatch(x):
        return None
    if not _WORDY.fullmatch(y):
        return None
    if _letters(x) == _letters(y):
        return len(_letters(x)) > 1 or x == y
    return False if _is_words(x) and _is_words(y) else None


def _is_words(text: str) -> bool:
    parts = re.findall(r"[^\W\d_]+", text)
    return bool(_WORDY.fullmatch(text)) and any(len(p) > 2 and p not in _FUNCTIONS for p in parts)


def _letters(text: str) -> str:
    text = re.sub(r"^(?:the|an|a)\s+", "", text.strip().lower())
    return re.sub(r"[\W_]+", "", text)


# ---- lists, tuples, sets, intervals, matrices

_MATRIX = re.compile(r"\(?\s*\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}\s*\)?", re.DOTALL)
_AND = re.compile(r"(?:,\s*)?(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))")


def _same_parts(a: str, b: str) -> bool | None:
    """True when two answers of several parts agree part by part; None leaves the rest to algebra."""
    if max(len(a), len(b)) > _LEAF_CHARACTERS:
        return None
    x, y = _MATRIX.fullmatch(a), _MATRIX.fullmatch(b)
    if x and y:
        rows = [[row.split("&") for row in re.split(r"\\\\", m[2].strip().strip("\\"))] for m in (x, y)]
        if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
            return None
        cells = [[cell for row in side for cell in row] for side in rows]
        return True if len(cells[0]) <= _ITEMS and all(map(equal, *cells)) else None
    x, y = parts(a), parts(b)
    if x is None or y is None or len(x[1]) != len(y[1]) or len(x[1]) > _ITEMS:
        return None
    if x[0] != y[0]:
        # A set is no tuple and no interval; a list without brackets may be one.
        return False if any(t.startswith(r"\{") for t in (a, b)) and "{}" in (x[0], y[0]) else None
    if x[0] != "{}":
        return True if all(map(equal, x[1], y[1])) else None
    left = list(y[1])
    for item in x[1]:
        match = next((other for other in left if equal(item, other)), None)
        if match is None:
            return None
        left.remove(match)
    return True


def parts(text: str) -> tuple[str, list[str]] | None:
    """The brackets and the two or more items between them; `{}` for a set and for a list without brackets."""
    text = text.strip()
    brackets = "{}"
    inside = text
    for start, end in ((r"\{", r"\}"), ("{", "}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(start) and text.endswith(end) and len(text) > len(start + end):
            inner = text[len(start) : -len(end)]
            if _split(inner) is not None and _closed(inner):
                brackets = "{}" if "{" in start else start + end
                inside = inner
                break
    items = _split(_AND.sub(",", inside))
    if items is None or not all(items):
        return None
    if brackets == "{}":
        items = [item for both in items for item in _both_signs(both)]
    return (brackets, items) if len(items) > 1 else None


def _both_signs(text: str) -> list[str]:
    """`3 \\pm 2` as two."""
    if not re.search(r"\\(?:pm|mp)(?![a-z])", text):
        return [text]
    signs = ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
    both = [re.sub(r"\\(pm|mp)(?![a-z])\s*", lambda m, sign=sign: sign[m[1]], text) for sign in signs]
    return [one.strip().removeprefix("+") for one in both]


def _closed(text: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\[{}]|\\.|[()\[\]{}]", text, re.DOTALL):
        depth += 1 if token[0] in ("(", "[", "{", r"\{") else -1 if token[0] in (")", "]", "}", r"\}") else 0
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str] | None:
    """At commas and semicolons outside brackets; None when brackets don't match."""
    items, depth, start = [], 0, 0
    for token in re.finditer(r"\\[{}]|\\.|[()\[\]{},;]", text, re.DOTALL):
        if token[0] in ("(", "[", "{", r"\{"):
            depth += 1
        elif token[0] in (")", "]", "}", r"\}"):
            depth -= 1
            if depth < 0:
                return None
        elif token[0] in (",", ";") and depth == 0:
            items.append(text[start : token.start()].strip())
            start = token.end()
    return None if depth else [*items, text[start:].strip()]


# ---- algebra


@cache
def prepare():
    """math-verify, imported; a grader process calls this before its clock starts."""
    import math_verify

    # It warns that its time limits are off, which they are meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its patterns and its parser's tables are made when first used, which would be in every new grader process.
    tried = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (r"\frac{x}{2}", "(1,2]", "x=1")]
    math_verify.verify(tried[0], tried[2], timeout_seconds=None)
    return math_verify


def parse(text: str) -> list:
    """Parse a text with math-verify."""
    return prepare().parse(text, parsing_timeout=None)


@lru_cache(maxsize=256)
def parse_gold(gold: str) -> list:
    return parse(delimited(gold))


def delimited(text: str) -> str:
    """math-verify takes bare text for prose, where it sees numbers only; a box makes it LaTeX."""
    return text if re.search(r"\$|\\\(|\\\[|\\boxed", text) else f"\\boxed{{{text}}}"


def verified(gold: list, found: list) -> bool:
    return bool(gold and found) and prepare().verify(gold, found, timeout_seconds=None)


def _by_math_verify(gold: str, found: str) -> bool:
    return verified(parse_gold(gold), parse(delimited(found)))


def _rounds_to(exact: str, decimal: str) -> bool:
    """`decimal` is a decimal number of ROUNDED_DIGITS or more, and `exact` an expression with that rounded value."""
    value = read_number(decimal)
    if value is None or value.decimals is None or value.digits < ROUNDED_DIGITS or re.search(r"[0-9]\.[0-9]", exact):
        return False
    for expression in parse_gold(exact):
        expression = getattr(expression, "rhs", expression)
        if getattr(expression, "is_number", False) and getattr(expression, "is_real", False):
            difference = (expression - Fraction(value.value)).evalf(30)
            return bool(abs(difference) <= Fraction(1, 2 * 10**value.decimals))
    return False
