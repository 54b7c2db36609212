"""Numbers as people and models write them, read exactly and without importing anything heavy."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

ROUNDED_DIGITS = 4
"""A decimal of so many significant digits stands for the exact value that it is the rounded value of (2.6667: 8/3)."""
CUT_DIGITS = 7
"""A decimal of so many significant digits may as well be the exact value cut off (0.6666666: 2/3)."""
DECIMAL_DIGITS = 6
"""A decimal with so many significant digits and digits after the point stands for a longer one rounded to it."""
_FLOAT_DIGITS = 15
"""Longer decimals were computed in double precision: 0.30000000000000004 is 0.3."""
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
# What can't be the list of two integers: 0,25 and 3,05 and 1.234,5 and 1000,99.
_NO_LIST = re.compile(r"[-+]?(?:0,[0-9]{2,}|[0-9]+,0[0-9]+|[0-9]{4,},[0-9]{2}|[0-9]+\..*)")
_MIXED = re.compile(
    r"([-+]?)\s*([0-9]{1,12})(?:\s+|\s*\\ \s*|\s*(?=\\frac))"
    r"(?:\\frac\s*\{([0-9]{1,12})\}\s*\{([0-9]{1,12})\}|([0-9]{1,12})/([0-9]{1,12}))"
)
_FRACTION = re.compile(r"([-+]?)\s*\\frac\s*\{([-+]?[0-9]{1,40})\}\s*\{([0-9]{1,40})\}")
_SCIENTIFIC = re.compile(
    r"([-+]?[0-9]{1,40}(?:\.(?P<decimals>[0-9]{1,40}))?)(?:[eE]([-+]?[0-9]{1,4})"
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
    """Digits after the point, less than none where a power of ten follows; None: it has no point."""
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
    """Return `text` as a number, in any of the ways of writing one: what plain_number reads, and percent, 1 000,
    1000,99, 4 4/9, 4\\frac{4}{9}, \\frac{4}{9}, 1.5e3, 1.5 \\times 10^{3}, 5 million. None when it is something else;
    3,5 is a list of two."""
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
    if (match := _DECIMAL_COMMA.fullmatch(text)) and _NO_LIST.fullmatch(text):
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
        exponent = int(match[3] or match[4] or match[5])
        if abs(exponent) <= _EXPONENT:
            value = Fraction(match[1]) * Fraction(10) ** exponent
            if match["decimals"] is None:
                return Value(value)
            digits = re.sub(r"\D", "", match[1]).lstrip("0")
            return Value(value, decimals=len(match["decimals"]) - exponent, digits=len(digits))
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


_SIZES = {
    "length": {
        Fraction(1, 1000): "mm millimeter millimetre",
        Fraction(1, 100): "cm centimeter centimetre",
        Fraction(1): "m meter metre",
        Fraction(1000): "km kilometer kilometre",
        Fraction(254, 10000): "in inch inches",
        Fraction(3048, 10000): "ft foot feet",
        Fraction(9144, 10000): "yd yard",
        Fraction(1609344, 1000): "mi mile",
    },
    "mass": {
        Fraction(1, 1000): "mg milligram",
        Fraction(1): "g gram",
        Fraction(1000): "kg kilogram",
    },
    "time": {
        Fraction(1): "s sec second",
        Fraction(60): "min minute",
        Fraction(3600): "h hr hour",
        Fraction(86400): "day",
        Fraction(604800): "week",
    },
    "volume": {Fraction(1): "ml milliliter millilitre", Fraction(1000): "l liter litre"},
}
_UNITS = {
    name: (kind, size) for kind, sizes in _SIZES.items() for size, names in sizes.items() for name in names.split()
}


_MEASURED = re.compile(r"(?P<number>.*[0-9])\s*(?:\\text\s*\{\s*|\{\s*\\rm\s+)?(?P<unit>[A-Za-z]+)\.?\s*\}?")


def same_measure(a: str, b: str) -> bool | None:
    """Compare two lengths, masses, times or volumes in different units: 5 cm is not 5 m. None for anything else."""
    x, y = (_measure(text) for text in (a, b))
    return x[1] == y[1] if x and y and x[0] == y[0] and x[2] != y[2] else None


def _measure(text: str) -> tuple[str, Fraction, Fraction] | None:
    """Return what is measured, the value in the smallest terms, and the unit's size."""
    match = _MEASURED.fullmatch(text) if len(text) < 200 else None
    name = match["unit"].lower() if match else ""
    kind, size = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or ("", Fraction(0))
    value = read_number(match["number"]) if match and kind else None
    return (kind, value.value * size, size) if value else None


def number_of(text: str) -> Value | None:
    """The number that an answer is, its unit aside."""
    value = read_number(text)
    if value is None and len(text) < 200 and (bare := without_unit(text)) != text:
        value = read_number(bare)
    return value


def same_value(gold: Value, found: Value) -> bool:
    """Equal numbers; 28% is 28 as well as 0.28; a decimal may be the other side rounded, as its digits allow."""
    if gold.percent != found.percent:
        percent, other = (gold, found) if gold.percent else (found, gold)
        decimals = None if percent.decimals is None else percent.decimals + 2
        part = Value(percent.value / 100, decimals=decimals, digits=percent.digits)
        return _same_written(percent, other) or _same_written(part, other)
    if gold.fraction and found.fraction and math.gcd(*gold.fraction) == 1 < math.gcd(*found.fraction):
        return False
    return _same_written(gold, found)


def _same_written(a: Value, b: Value) -> bool:
    return a.value == b.value or _stands_for(a, b) or _stands_for(b, a)


def _stands_for(decimal: Value, other: Value) -> bool:
    """True when `decimal`, with the digits that it has, is another spelling of `other`; an integer is exact."""
    if decimal.decimals is None:
        return False
    difference, unit = abs(decimal.value - other.value), Fraction(10) ** -decimal.decimals
    if decimal.digits >= _FLOAT_DIGITS and difference * 10**14 <= abs(other.value):
        return True
    if other.decimals is not None:
        enough = min(decimal.digits, decimal.decimals) >= DECIMAL_DIGITS and other.decimals > decimal.decimals
        return enough and 2 * difference <= unit
    if other.value.denominator == 1 or decimal.digits < ROUNDED_DIGITS:
        return False
    cut = decimal.digits >= CUT_DIGITS and abs(decimal.value) < abs(other.value)
    return difference < unit if cut else 2 * difference <= unit
