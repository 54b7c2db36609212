"""Numbers as people and models write them, read exactly and without importing anything heavy."""

import re
from dataclasses import dataclass
from fractions import Fraction

DECIMALS = 6
"""Digits after the point that must agree when one side is a decimal, as in math-verify (0.333333 is 1/3)."""
PLAIN_CHARACTERS = 100
"""Longer numbers go to math-verify; Python itself refuses to read those of some thousand digits."""
_EXPONENT = 400
"""Larger powers of ten are left alone: as a fraction they have as many digits."""

_PLAIN = re.compile(
    r"\$*\s*(?P<sign>[-+\u2212]?)\s*(?:\\?[$€£¥]\s*)?"
    r"(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]+)?(?:\s*/\s*(?P<divisor>[0-9]+))?\.?\s*\$*\.?"
)
_SPACED = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:[ \u00a0\u202f][0-9]{3})+)(?![0-9])")
_DECIMAL_COMMA = re.compile(r"([-+]?)([0-9]+|[1-9][0-9]{0,2}(?:\.[0-9]{3})+),([0-9]+)")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_MIXED = re.compile(
    r"([-+]?)\s*([0-9]{1,12})(?:\s+|\s*\\ \s*|\s*(?=\\frac))"
    r"(?:\\frac\s*\{([0-9]{1,12})\}\s*\{([0-9]{1,12})\}|([0-9]{1,12})/([0-9]{1,12}))"
)
_FRACTION = re.compile(r"([-+]?)\s*\\frac\s*\{([-+]?[0-9]{1,40})\}\s*\{([0-9]{1,40})\}")
_SCIENTIFIC = re.compile(
    r"([-+]?[0-9]{1,40}(?:\.[0-9]{1,40})?)(?:[eE]([-+]?[0-9]{1,4})"
    r"|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{([-+]?[0-9]{1,4})\}|([-+]?[0-9]{1,4})))"
)
_PERCENT = re.compile(
    r"\s*\$?\s*(?:\\?%|\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?:percent(?:age)?|pct)\b)\s*\$?\s*\.?$", re.I
)
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})\s*\}}?$", re.IGNORECASE)


@dataclass(frozen=True)
class Value:
    """A number that was written out: its exact value and how it was written."""

    value: Fraction
    percent: bool = False
    """The value is that of the number before the percent sign."""
    decimals: int | None = None
    """Digits after the point; None: it has no point."""
    digits: int = 0
    """Significant digits, of a number with a point."""
    fraction: tuple[int, int] | None = None
    """Numerator and divisor, where it was written as a fraction."""


def plain_number(text: str) -> Fraction | None:
    """The value of an integer, decimal or a/b, with thousands separators, sign or currency; None for anything else."""
    if len(text) > PLAIN_CHARACTERS:
        return None
    match = _PLAIN.fullmatch(text.strip())
    if match is None or not (match["whole"] or match["decimals"]):
        return None
    value = Fraction((match["whole"] or "0").replace(",", "") + (match["decimals"] or ""))
    if match["divisor"]:
        if int(match["divisor"]) == 0:
            return None
        value /= int(match["divisor"])
    return -value if match["sign"] in ("-", "\u2212") else value


def read_number(text: str) -> Value | None:
    """`text` as a number, in any of the ways of writing one: what plain_number reads, and percent, 1 000, 1000,99,
    4 4/9, 4\\frac{4}{9}, \\frac{4}{9}, 1.5e3, 1.5 \\times 10^{3}, 5 million. None when it is something else."""
    if len(text) > PLAIN_CHARACTERS:
        return None
    text = text.strip().replace("\u2212", "-")
    bare = _PERCENT.sub("", text)
    if bare != text:
        inner = read_number(bare)
        return inner and Value(inner.value, True, inner.decimals, inner.digits, inner.fraction)
    scale = _SCALE.search(text)
    if scale and (inner := read_number(text[: scale.start()])):
        return Value(inner.value * _SCALES[scale[1].lower()])
    text = _SPACED.sub(lambda m: m[1] + re.sub(r"\s", "", m[2]), text)
    value = plain_number(text)
    if value is not None:
        point, divisor = re.search(r"\.([0-9]+)", text), re.search(r"([0-9][0-9,]*)\s*/\s*([0-9]+)", text)
        digits = re.sub(r"\D", "", text).lstrip("0") if point else ""
        fraction = (int(divisor[1].replace(",", "")), int(divisor[2])) if divisor and not point else None
        return Value(value, False, len(point[1]) if point else None, len(digits), fraction)
    if (match := _DECIMAL_COMMA.fullmatch(text)) and not _THOUSANDS.fullmatch(text.lstrip("+-")):
        sign, whole, decimals = match[1], match[2].replace(".", ""), match[3]
        return Value(Fraction(f"{sign}{whole}.{decimals}"), False, len(decimals), len((whole + decimals).lstrip("0")))
    if match := _MIXED.fullmatch(text):
        top, bottom = int(match[3] or match[5]), int(match[4] or match[6])
        if top < bottom:  # 11 7/6 is no mixed number, and 4 0/0 is nothing
            value = int(match[2]) + Fraction(top, bottom)
            return Value(-value if match[1] == "-" else value)
        return None
    if match := _FRACTION.fullmatch(text):
        if int(match[3]) == 0:
            return None
        value = Fraction(int(match[2]), int(match[3]))
        return Value(-value if match[1] == "-" else value, fraction=(abs(int(match[2])), int(match[3])))
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match[2] or match[3] or match[4])
        if abs(exponent) <= _EXPONENT:
            return Value(Fraction(match[1]) * Fraction(10) ** exponent)
    return None


_UNIT_TEXT = re.compile(
    r"(?<=[0-9})\]%a-z])\s*(?:\\text\s*\{(?P<text>[^{}]*)\}|\{\s*\\rm\s+(?P<rm>[^{}]*)\})(?:\s*\^\s*(?:[0-9]|\{\s*-?[0-9]\s*\}))?$"
)
_UNIT_WORDS = re.compile(
    r"(?<=[0-9})\]])(?P<gap>\s*)(?P<words>[A-Za-z][A-Za-z]+\.?(?:[\s/.-]+[A-Za-z]+\.?){0,4})(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?$"
)
_CURRENCY = re.compile(r"^\s*(?:\\?\$|[€£¥]|Rs\.?\s|USD\s|RMB\s)\s*|\s*(?:\\?\$|[€£¥])\s*$")
_NO_UNITS = frozenset(
    "pi sqrt sin cos tan cot sec csc log ln exp mod or and to by times plus minus over squared cubed factorial choose "
    "infinity inf if is are not no than between from through until per hundred thousand million billion trillion "
    "dozen half am pm".split()
)


def without_unit(text: str) -> str:
    """`17\\text{ any text}`, `15\\text{ cm}^2`, `42 square feet`, `\\$10` without what is no part of the number."""
    text = _CURRENCY.sub("", _CURRENCY.sub("", text)).strip()
    if match := _UNIT_TEXT.search(text):
        words = (match["text"] or match["rm"] or "").lower().split()
        if words not in (["i"], ["e"]) and not _NO_UNITS & set(words):
            return text[: match.start()].strip()
    elif match := _UNIT_WORDS.search(text):
        words = re.split(r"[\s/.-]+", match["words"].lower())
        if not _NO_UNITS & set(words):
            return text[: match.start()].strip()
    return text


def number_of(text: str) -> Value | None:
    """The number that an answer is, its unit aside."""
    value = read_number(text)
    if value is None and len(text) < 200 and (bare := without_unit(text)) != text:
        value = read_number(bare)
    return value


def same_number(a: Fraction, b: Fraction) -> bool:
    """Equal, or equal once rounded to DECIMALS digits where one of the two is no integer."""
    return a == b or (a.denominator * b.denominator != 1 and round(a, DECIMALS) == round(b, DECIMALS))
