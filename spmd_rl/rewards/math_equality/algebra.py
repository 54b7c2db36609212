"""Decide by algebra whether two answers are equal, by math-verify (https://github.com/huggingface/Math-Verify).

It is imported when first needed. Its own time limits are signals, and are off: the process that runs this is killed
instead (grading/).
"""

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache

from spmd_rl.rewards.math_equality.numbers import ROUNDED_DIGITS, read_number


@cache
def prepare():
    """Import math-verify; a grader process calls this before its clock starts."""
    import math_verify

    # It warns that its time limits are off, which they are meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its patterns and its parser's tables are made when first used, which would be in every new grader process.
    tried = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (r"\frac{x}{2}", "(1,2]", "x=1")]
    # Its own comparison takes numbers for equal that agree in six digits after the point, or differ by less than 1e-15.
    math_verify.grader.sympy_numeric_eq = _numerically_equal
    math_verify.verify(tried[0], tried[2], timeout_seconds=None)
    return math_verify


def _numerically_equal(a, b, digits: int, precision: int) -> bool:
    """Replace math_verify.grader.sympy_numeric_eq: numbers are equal that agree in their leading digits.

    Exact ones in 20; where one is a decimal in six, as well as in six after the point. What has variables is left to
    sympy's simplification, which comes next.
    """
    import sympy
    from math_verify import grader

    matrices = (sympy.MatrixBase, sympy.MatrixExpr)
    if isinstance(a, matrices) or isinstance(b, matrices):
        a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
        if not (isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase) and a.shape == b.shape):
            return False
        return all(_numerically_equal(x, y, digits, precision) for x, y in zip(a.flat(), b.flat(), strict=True))
    percents = [grader.get_pct_val(side) for side in (a, b)]
    if any(percents) and all(grader.is_atomic_or_pct_atomic(side, sympy.Integer) for side in (a, b)):
        return grader.get_pct_val(a, a) == grader.get_pct_val(b, b)
    a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
    if a == b:
        return True
    if getattr(a, "is_Rational", False) and getattr(b, "is_Rational", False):
        return False
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return False
    difference, largest = abs((a - b).evalf(30)), max(abs(a.evalf(30)), abs(b.evalf(30)))
    if not largest.is_finite:
        return False
    if not (a.has(sympy.Float) or b.has(sympy.Float)):
        return bool(difference <= sympy.Rational(1, 10**20) * largest)
    if a.is_Integer or b.is_Integer:
        return bool(difference <= sympy.Rational(1, 10**14) * largest)
    return bool(difference <= 1e-6 * min(largest, 1))


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


def same_algebra(gold: str, found: str) -> bool:
    return verified(parse_gold(gold), parse(delimited(found)))


def rounds_to(exact: str, decimal: str) -> bool:
    """`decimal` is a decimal number of ROUNDED_DIGITS or more, and `exact` an expression with that rounded value."""
    value = read_number(decimal)
    if value is None or value.decimals is None or value.digits < ROUNDED_DIGITS or re.search(r"[0-9]\.[0-9]", exact):
        return False
    for expression in parse_gold(exact):
        expression = getattr(expression, "rhs", expression)
        if getattr(expression, "is_number", False) and getattr(expression, "is_real", False):
            difference = (expression - Fraction(value.value)).evalf(30)
            return bool(abs(difference) <= Fraction(10) ** -value.decimals / 2)
    return False
