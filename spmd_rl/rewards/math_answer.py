"""Is the response's final answer mathematically equal to the gold answer?

Plain numbers, nearly all the work of arithmetic and GSM8K, are compared right here. Everything else goes to math-verify
(https://github.com/huggingface/Math-Verify), which is imported when first needed. Its own time limits are signals, and
are off: the process that runs this is killed instead (pool.py).
"""

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache

from spmd_rl.rewards.grade import Grade, RewardSample

DECIMALS = 6
"""Digits after the point that must agree when one side is a decimal, as in math-verify (0.333333 is 1/3)."""
PLAIN_CHARACTERS = 100
"""Longer numbers go to math-verify; Python itself refuses to read those of some thousand digits."""
SEARCHED_CHARACTERS = 4000
"""The end of a response that is searched when it states no answer; math-verify's patterns are slow on long texts."""

_PLAIN = re.compile(
    r"\$*\s*(?P<sign>[-+\u2212]?)\s*(?:\\?[$€£¥]\s*)?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]+)?(?:\s*/\s*(?P<divisor>[0-9]+))?\.?\s*\$*\.?"
)
# A number in prose: not part of a word (x2), and a minus sign after a digit, letter or bracket subtracts.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?(?:\\?[$€£¥]\s?)?(?<![\w.])"
    r"(?:[0-9](?:[0-9]|,(?=[0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+(?![0-9/]))?(?:\s?\\?%|\s?percent\b)?"
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<!\\)\$(?:\\\$|[^$\n])+?(?<!\\)\$|-?\\[dt]?frac\{[^{}]+\}\{[^{}]+\}",
    re.DOTALL,
)
_THOUSANDS = re.compile(r",\\!\s*|\{,\}(?:\\!)?\s*")
# What stands between two dollar signs may be prose between two prices.
_MATHEMATICAL = re.compile(r"[=^_]|\\[a-zA-Z]")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s")
_SUM_EQUALS = re.compile(r"[0-9\s.,+\-*/×÷x()$%\u2212]*=\s*")
_STATED = re.compile(r"\banswer\**\s*(?:is\b|[:=])[\s:*]*|####\s*", re.IGNORECASE)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def math_answer(sample: RewardSample) -> Grade:
    """The rule: 1.0 when the response's final answer equals the gold answer.

    A response that the length limit cut off before it stated an answer is truncated rather than wrong; the number it
    happens to stop at still counts when it is right.
    """
    grade, stated = _judge(sample.answer, sample.response)
    if sample.finish_reason == "length" and not stated and grade.cause != "correct":
        return Grade(0.0, "truncated", grade.extracted)
    return grade


def is_correct(gold: str, response: str) -> Grade:
    """Grade of `response`: 1.0 correct, 0.0 wrong, or 0.0 unparsed when it holds no answer at all.

    The answer is the last \\boxed{}; else what follows the last "answer is", "Answer:" or "####"; else the last number
    or formula. Where a response has `</think>` or `<answer>`, only what follows the one and stands in the other counts.
    `gold` is a number (1,000 and 1000.0 are the same), LaTeX with or without delimiters, or a solution that ends in
    `#### N`. Raises a ValueError when it is empty.
    """
    return _judge(gold, response)[0]


def _judge(gold: str, response: str) -> tuple[Grade, bool]:
    """The grade, and whether the response stated an answer (rather than one being guessed)."""
    gold = _tidy(_THOUSANDS.sub(",", gold.rpartition("####")[2]))
    if not gold:
        raise ValueError("the gold answer is empty, so nothing can equal it; drop the row or give it an answer")
    number = plain_number(gold)
    extracted, stated = find_answer(response, numeric=number is not None)
    if extracted is None:
        return Grade(0.0, "unparsed"), stated
    found = plain_number(extracted)
    if extracted == gold:
        equal = True
    elif number is not None and found is not None:
        equal = same_number(number, found)
    elif stated or number is not None:
        equal = _equal(_parse_gold(gold), _parse(_delimited(extracted)))
    else:
        parsed = _parse(extracted)
        if not parsed:
            return Grade(0.0, "unparsed"), stated
        equal, extracted = _equal(_parse_gold(gold), parsed), str(parsed[-1])
    return Grade(float(equal), "correct" if equal else "wrong", extracted), stated


def find_answer(response: str, numeric: bool) -> tuple[str | None, bool]:
    """The final answer as the response spells it (None: there is none), and whether the response stated it as one.

    `numeric`: the gold answer is a number, so a number or formula is picked out of the sentence that states the answer,
    or out of the whole response. Otherwise a response that states none is returned whole, for math-verify to search.
    """
    text, tagged = _final_text(response)
    box = last_boxed(text)
    if box is not None:
        return box, True
    markers = list(_STATED.finditer(text))
    if markers:
        line = _first_formula_or_line(text[markers[-1].end() :].lstrip())
        answer = _pick(_SUM_EQUALS.sub("", line, count=1), last=False) if numeric else line
        if answer:
            return _tidy(answer), True
    end = text[-SEARCHED_CHARACTERS:]
    answer = _pick(end, last=True) if numeric else end.strip()
    return (_tidy(answer) if answer else None), tagged and bool(answer)


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{} (or \\fbox{}) that is closed and not empty; of nested ones the inner."""
    last_start, content = -1, None
    opened: list[int | None] = []  # where the content of each open brace starts, None for a brace that is no box
    for token in _BRACES.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None and start > last_start and text[start : token.start()].strip():
                last_start, content = start, _tidy(text[start : token.start()])
    return content


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


def same_number(a: Fraction, b: Fraction) -> bool:
    """Equal, or equal once rounded to DECIMALS digits where one of the two is no integer."""
    return a == b or (a.denominator * b.denominator != 1 and round(a, DECIMALS) == round(b, DECIMALS))


def _final_text(response: str) -> tuple[str, bool]:
    """What follows `</think>`, and of that what stands in the last `<answer>`; and whether there was one.

    LaTeX's thousands separators have become commas.
    """
    text = _THOUSANDS.sub(",", response.rpartition("</think>")[2])
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return text, False
    return text[start + len("<answer>") : end], True


def _first_formula_or_line(text: str) -> str:
    formula = _FORMULA.match(text[:SEARCHED_CHARACTERS])
    return formula[0] if formula and _is_mathematics(formula[0]) else text.partition("\n")[0].strip()


def _pick(text: str, last: bool) -> str | None:
    """The last (or first) number or formula in a text; a formula wins over the numbers in it."""
    numbers = [(m.start(), m.end(), m[0]) for m in _NUMBER.finditer(text)]
    formulas = [(m.start(), m.end(), m[0]) for m in _FORMULA.finditer(text) if _is_mathematics(m[0])]
    if last:
        return max(numbers + formulas, key=lambda m: (m[1], -m[0]), default=(0, 0, None))[2]
    return min(numbers + formulas, key=lambda m: (m[0], -m[1]), default=(0, 0, None))[2]


def _is_mathematics(formula: str) -> bool:
    inner = re.sub(r"^(\$\$|\\\[|\\\(|\$)|(\$\$|\\\]|\\\)|\$)$", "", formula).strip()
    return plain_number(inner) is not None or bool(_MATHEMATICAL.search(inner) and not _PROSE.search(inner))


def _tidy(text: str) -> str:
    """Without what is no part of the answer: white space, a final full stop, bold face, delimiters around a number."""
    text = text.strip().rstrip(".").strip().strip("*")
    inner = re.sub(r"^(\$\$|\\\[|\\\()\s*|\s*(\$\$|\\\]|\\\))$", "", text)
    return inner if plain_number(inner) is not None else text


@cache
def prepare():
    """math-verify, imported; a grader process calls this before its clock starts."""
    import math_verify

    # It warns that its time limits are off, which they are meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _parse(text: str) -> list:
    return prepare().parse(text, parsing_timeout=None)


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> list:
    return _parse(_delimited(gold))


def _delimited(text: str) -> str:
    """math-verify takes bare text for prose, where it sees numbers only; a box makes it LaTeX."""
    return text if re.search(r"\$|\\\(|\\\[|\\boxed", text) else f"\\boxed{{{text}}}"


def _equal(gold: list, found: list) -> bool:
    return bool(gold and found) and prepare().verify(gold, found, timeout_seconds=None)


math_answer.prepare = prepare
