"""Find the final answer in a response."""

import re
from dataclasses import dataclass

from spmd_rl.rewards.math_equality.listed import listed
from spmd_rl.rewards.math_equality.numbers import number_of, plain_number, read_number
from spmd_rl.rewards.math_equality.spans import formula_around, is_list_of_numbers, western

SEARCHED_CHARACTERS = 4000
"""The end of a response that is searched when it states no answer; math-verify's patterns are slow on long texts."""

PLACES = ("boxed", "answer:", "answer is", "final")
"""Places of an answer, in the order in which the places are looked at: the last \\boxed{}; after the last
"Answer:" or "####"; after the last "answer is" (whichever of these two comes later); the last number or formula."""

# A number in prose: not part of a word (x2), and a minus sign after a digit, letter or bracket subtracts.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?(?:\\?[$€£¥]\s?)?(?<![\w.])"
    r"(?:[0-9](?:[0-9]|,(?=[0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+(?![0-9/]))?(?:\s?\\?%|\s?percent\b)?"
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<!\\)\$(?:\\\$|[^$\n])+?(?<!\\)\$|-?\\[dt]?frac\{[^{}]+\}\{[^{}]+\}",
    re.DOTALL,
)
THOUSANDS = re.compile(r",\\!\s*|\s?\{\s*,\s*\}(?:\\!)?\s*")
# What stands between two dollar signs may be prose between two prices.
_MATHEMATICAL = re.compile(r"[=^_]|\\[a-zA-Z]")
_PROSE = re.compile(r"(?<![\\A-Za-z{])(?!and\s)[A-Za-z]{3,}\s")
_ARITHMETIC = re.compile(r"[(\s]*-?[0-9.]+(?:[\s()]*[-+*/^][\s()]*[0-9.]+)+[\s)]*")
_SUM_EQUALS = re.compile(r"[0-9\s.,+\-*/×÷x()$%\u2212]*=\s*")
_COLON = r"\banswer\**\s*[:=：]|####|答案\s*[:：]"
_IS = r"\banswer\**\s*is\b|\bcorrect\s+(?:option|choice)\s+is\b|答案\s*[是为]"
_STATED = {
    ("answer:",): re.compile(rf"(?:{_COLON})[\s:*]*", re.IGNORECASE),
    ("answer is",): re.compile(rf"(?:{_IS})[\s:*]*", re.IGNORECASE),
    ("answer:", "answer is"): re.compile(rf"(?:{_COLON}|{_IS})[\s:*]*", re.IGNORECASE),
}
# After a box, only this strongest of statements counts, and only when a number or formula follows at once.
_FINAL = re.compile(r"\bfinal answer\**\s*is\s*:?\s*", re.IGNORECASE)
_BRACES = re.compile(r"(?P<box>(?<!\\)\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPEN_BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{(?!\s*\})")
# What says that the number behind it is none.
_DENIED = re.compile(r"(?:\b(?:not|never)\b|n't(?:\s+be)?|≠|\\neq?(?![a-z]))(?:\s+equal\s+to)?[\s$*(]*$", re.IGNORECASE)
_BARE_BOX = re.compile(r"(?<!\\)\\+boxed\s+([^\s{}$]+)")
_BETWEEN = re.compile(r"\\[()\[\]]|\$|\\q?quad|\\[,;: ]|\\text\s*\{([^{}]*)\}")
_LINK = re.compile(
    r"(?:[a-z]+ ?){0,2}(?:,|;|,? ?\b(?:and|or)\b|,)(?: ?[A-Za-z]\w*(?:_\{?\w+\}?)? ?=)?|[^\w=.]{0,9}", re.IGNORECASE
)


@dataclass(frozen=True)
class Found:
    """An answer as the response spells it."""

    text: str | None
    """None: there is none."""
    place: str | None
    """Which of PLACES it stands in; None for one in `<answer>` tags that is marked in no other way."""
    joined: str | None = None
    """Join the last box with those before it that it belongs to, `\\boxed{1} and \\boxed{2}`, with commas; or the list
    that the response ends in, with `or`."""

    @property
    def stated(self) -> bool:
        """The response said that this is its answer."""
        return self.text is not None and self.place != "final"


def find_answer(response: str, numeric: bool, places: tuple[str, ...] = PLACES) -> Found:
    """The final answer of a response.

    Where the response has `</think>`, only what follows counts, and of that only what stands in the last `<answer>`.
    `numeric`: the gold answer is a number, so a number or formula is picked out of the sentence that states the answer,
    or out of the whole response. Otherwise a response that states none is returned whole, for math-verify to search.
    """
    text, tagged = final_text(response)
    if "boxed" in places:
        box, joined, end = boxes(text)
        if box is not None and _OPEN_BOX.search(text, end):
            return Found(None, None)  # it was stating another one
        if box is not None:
            later = _final_statement(text[end:], numeric) if "answer is" in places else None
            return Found(later, "answer is") if later else Found(box, "boxed", joined)
    stated = _STATED.get(tuple(place for place in ("answer:", "answer is") if place in places))
    markers = list(stated.finditer(text)) if stated else []
    if markers:
        line = _first_formula_or_line(text[markers[-1].end() :].lstrip())
        answer = pick(_SUM_EQUALS.sub("", line, count=1), last=False) if numeric else line
        if numeric and (items := listed(line, last=False)):
            answer = " or ".join(items)
        elif numeric and (whole := tidy(line.partition("=")[2] or line)):
            answer = whole if read_number(whole) or is_list_of_numbers(whole) else answer
        if answer:
            return Found(tidy(answer), "answer is" if re.search(_IS, markers[-1][0], re.IGNORECASE) else "answer:")
    if "final" not in places or "<think>" in text:
        return Found(None, None)  # in a thought that has no end nothing is the answer that is not said to be it
    end = text[-SEARCHED_CHARACTERS:].strip()
    if numeric and number_of(tidy(end)):
        return Found(tidy(end), None if tagged else "final")
    items = listed(end, last=True)
    joined = " or ".join(items) if items else None
    answer = (joined or pick(end, last=True)) if numeric else end
    return Found(tidy(answer) if answer else None, None if tagged else "final", joined)


def boxes(text: str) -> tuple[str | None, str | None, int]:
    """Return the last box's content, all contents where an answer is spread over several, and where the last ends.

    A box, \\boxed{} or \\fbox{}, counts when it is closed and not empty; of nested ones the inner does.
    """
    found: list[tuple[int, int, str]] = []  # where a command starts and ends, and its content
    opened: list[tuple[int, int] | None] = []  # where an open box and its content start, None for another brace
    for token in _BRACES.finditer(text):
        if token["box"]:
            opened.append((token.start(), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            box = opened.pop()
            if box is not None and text[box[1] : token.start()].strip():
                found.append((box[0], token.end(), text[box[1] : token.start()].strip()))
    if not found:
        bare = _BARE_BOX.findall(text)
        return (tidy(bare[-1]) or None if bare else None), None, len(text)
    found.sort()
    start, end, last = found.pop()
    contents = [last]
    for box_start, box_end, content in reversed(found):
        if box_end > start or not _LINK.fullmatch(_between(text[box_end:start])):
            break
        start = box_start
        if content != contents[-1]:
            contents.append(content)
    return tidy(last), (", ".join(reversed(contents)) if len(contents) > 1 else None), end


def _between(text: str) -> str:
    return " ".join(_BETWEEN.sub(lambda m: m[1] or " ", text).split()) if len(text) < 100 else text


def _final_statement(text: str, numeric: bool) -> str | None:
    """Return what a "final answer is" after the last box says, where a number or formula follows it at once."""
    markers = list(_FINAL.finditer(text))
    if not markers:
        return None
    rest = text[markers[-1].end() :]
    formula = _FORMULA.match(rest[:SEARCHED_CHARACTERS])
    if formula and _is_mathematics(formula[0]):
        return tidy(formula[0])
    number = _NUMBER.match(rest)
    return tidy(number[0]) if number and numeric else None


def final_text(response: str) -> tuple[str, bool]:
    """Return what follows `</think>`, and of that what stands in the last `<answer>`; and whether there was one.

    LaTeX's thousands separators have become commas.
    """
    text = THOUSANDS.sub(",", western(response.rpartition("</think>")[2]))
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return text, False
    return text[start + len("<answer>") : end], True


def _first_formula_or_line(text: str) -> str:
    formula = _FORMULA.match(text[:SEARCHED_CHARACTERS])
    delimited = formula and "frac" not in formula[0][:7] and _is_mathematics(formula[0])
    return formula[0] if formula and delimited else text.partition("\n")[0].strip()


def pick(text: str, last: bool) -> str | None:
    """Return the last (or first) number or formula in a text; a formula wins over the numbers in it."""
    numbers = [(m.start(), m.end(), m[0]) for m in _NUMBER.finditer(text) if not _denied(text, m.start())]
    formulas = [(m.start(), m.end(), m[0]) for m in _FORMULA.finditer(text) if _is_mathematics(m[0])]
    formulas = [found for found in formulas if not _denied(text, found[0])]
    if last:
        found = max(numbers + formulas, key=lambda m: (m[1], -m[0]), default=None)
    else:
        found = min(numbers + formulas, key=lambda m: (m[0], -m[1]), default=None)
    if found is None:
        return None
    delimited = found[2].startswith(("$", r"\(", r"\["))
    return found[2] if delimited and found in formulas else formula_around(text, found[0], found[1]) or found[2]


def _denied(text: str, position: int) -> bool:
    return bool(_DENIED.search(text, max(0, position - 30), position))


def is_prose(text: str) -> bool:
    return bool(_PROSE.search(text))


def _is_mathematics(formula: str) -> bool:
    inner = re.sub(r"^(\$\$|\\\[|\\\(|\$)|(\$\$|\\\]|\\\)|\$)$", "", formula).strip()
    if plain_number(inner) is not None or (len(inner) < 100 and _ARITHMETIC.fullmatch(inner)):
        return True
    return bool(_MATHEMATICAL.search(inner) and not _PROSE.search(inner))


def tidy(text: str) -> str:
    """Without what is no part of the answer: white space, a final full stop, bold face, delimiters around a number."""
    text = text.strip().rstrip(".").strip().strip("*")
    inner = re.sub(r"^(\$\$|\\\[|\\\()\s*|\s*(\$\$|\\\]|\\\))$", "", text)
    return inner if plain_number(inner) is not None else text
