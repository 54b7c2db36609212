"""Tell whether two written answers are the same answer.

Numbers, words, choices and lists are compared here, exactly; everything else goes to math-verify (algebra.py).
"""

import re
from functools import lru_cache

from spmd_rl.rewards.math_equality.algebra import rounds_to, same_algebra
from spmd_rl.rewards.math_equality.numbers import number_of, read_number, same_measure, same_value
from spmd_rl.rewards.math_equality.words import TEXT, in_order, same_choice, same_qualifiers, same_words, words

LONGER = 10
"""Text so many times as long as the gold answer (and 100 characters) is not the answer."""
_LEAF_CHARACTERS = 400
"""Longer texts are not taken apart: their parts would each be given to math-verify."""
_ITEMS = 40
"""Longer lists are left to math-verify whole."""


def equal(gold: str, found: str) -> bool:
    """Return True where `found` says what `gold` says; both as written, in LaTeX or not, with or without delimiters.

    Tuples, intervals and matrices have an order, sets have none. A list without brackets has one where the gold answer
    names its values (`x = 1, y = 2`) or has three or more that are sorted in no way. A fraction has to be in lowest
    terms where the gold one is (as prm800k has it). Raises nothing; may take for ever, as sympy may.
    """
    if gold == found:
        return True
    if len(found) > LONGER * (100 + len(gold)):
        return False
    a, b = clean(gold), clean(found)
    if not a or not b:
        return False
    if a == b or _squeezed(a) == _squeezed(b) or _squeezed(words(a)) == _squeezed(words(b)):
        return True
    decided = _decide(a, b)
    if decided is None:
        decided = same_algebra(gold, found) or ((a, b) != (gold, found) and same_algebra(a, b))
        decided = decided or rounds_to(a, b) or rounds_to(b, a)
    return decided


def _decide(a: str, b: str) -> bool | None:
    """The verdict where plain reading gives one, None where it takes algebra."""
    for judge in JUDGES:
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
        (r"\\text\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*([0-9])\s*([a-zA-Z])(?![a-zA-Z])", r"\\frac{\1}{\2}"),
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
    whole = TEXT.fullmatch(text)
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
    """Without white space, except behind a command's name and between two numbers: `\\pi x`, `1 1/2`."""
    kept = r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|(?<=[0-9])(\s)\s*(?=[0-9])|\s+"
    return re.sub(kept, lambda m: f"{m[1]} " if m[1] else " " if m[2] else "", text)


# ---- numbers


def _same_numbers(a: str, b: str) -> bool | None:
    x, y = number_of(a), number_of(b)
    if x and y is None and x.decimals and re.fullmatch(r"[-+]?[0-9]+,[0-9]{2,}", b):
        y = read_number(b.replace(",", "."))  # 2,74 for a gold 2.74; a gold 2,74 is a list
    return same_value(x, y) if x and y else None


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
    a, b = words(a), words(b)
    x, y = _HALF_OF_DAY.search(a), _HALF_OF_DAY.search(b)
    if x is None or y is None:
        return None
    return [re.sub(r"[\s.]", "", t.lower()) for t in (a, b)][0] == re.sub(r"[\s.]", "", b.lower())


# ---- lists, tuples, sets, intervals, matrices

_DOTS = re.compile(r"\\(?:[lc]?dots|dots[bcim])(?![a-zA-Z])|\.{3}|…")
_ITEM_OF_DOTS = re.compile(rf"[,;]\s*(?:{_DOTS.pattern})\s*(?:[,;]|$)")
_MATRIX = re.compile(r"\(?\s*\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}\s*\)?", re.DOTALL)
_NAMED = re.compile(r"\s*([A-Za-z]+)(?:_\{?([0-9]+)\}?)?\s*=[^=]*")
_FUNCTION = re.compile(r"([A-Za-z])\s*\(\s*([a-z])\s*\)(?:\s*=.*)?", re.DOTALL)
_AND = re.compile(r"(?:,\s*)?(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))")


def _same_progression(a: str, b: str) -> bool | None:
    """`1, 2, \\ldots, n` is the same list item by item; math-verify takes a number out of such a list."""
    if not (_ITEM_OF_DOTS.search(a) and _ITEM_OF_DOTS.search(b)):
        return None
    x, y = (parts(_DOTS.sub("...", side)) for side in (a, b))
    return x is not None and y is not None and x[0] == y[0] and len(x[1]) == len(y[1]) and all(map(equal, x[1], y[1]))


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
    if x is None or y is None:
        some, number = (x, b) if x else (y, a)
        # All of several spellings of a number are it; a list is none.
        return all(equal(number, item) for item in some[1]) if some and number_of(number) else None
    if len(x[1]) != len(y[1]) or len(x[1]) > _ITEMS:
        return None
    if x[0] != y[0]:
        # A set is no tuple and no interval; a list without brackets may be one.
        return False if any(t.startswith(r"\{") for t in (a, b)) and "{}" in (x[0], y[0]) else None
    if x[0] != "{}":
        return all(map(equal, x[1], y[1]))
    if not a.startswith((r"\{", "{")) and (in_order(x[1]) or (_names(x[1]) and not _names(y[1]))):
        return all(map(equal, x[1], y[1]))
    left = list(y[1])
    for item in x[1]:
        match = next((other for other in left if equal(item, other)), None)
        if match is None:
            return None
        left.remove(match)
    return True


def _names(items: list[str]) -> bool:
    """True for `x = 1, y = 2`, which says what is what; x_1 and x_2 are two solutions in any order."""
    names = [match.groups() for item in items if (match := _NAMED.fullmatch(item))]
    letters, indices = {name for name, _ in names}, [index for _, index in names]
    counted = len(letters) == 1 and indices == [str(n + 1) for n in range(len(indices))]
    return len(names) == len(items) == len(set(names)) and not counted


def _same_function(a: str, b: str) -> bool | None:
    """f(y) = 2y is f(x) = 2x: a function is the same whatever its variable is called."""
    x, y = _FUNCTION.fullmatch(a), _FUNCTION.fullmatch(b)
    if x is None or y is None or x[1] != y[1] or x[2] == y[2]:
        return None
    lone = r"(?<![A-Za-z\\]){}(?![A-Za-z])"
    return None if re.search(lone.format(x[2]), b) else equal(a, re.sub(lone.format(y[2]), x[2], b))


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


JUDGES = (
    same_measure,
    _same_numbers,
    _same_base,
    _same_time,
    same_choice,
    _same_progression,
    _same_parts,
    same_qualifiers,
    _same_function,
    same_words,
)
"""Judges that need no algebra, in this order: the first verdict counts."""
