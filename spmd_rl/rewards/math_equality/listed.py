"""Find an answer that is a list in prose: `So x = 3 or x = 5` states two values, and neither is the answer alone."""

import re

from spmd_rl.rewards.math_equality.numbers import read_number, same_value

_NUMBER = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"
_VALUE = (
    rf"(?:(?<![\w)}}\]])(?<![0-9)}}\]]\s)[-+\u2212]\s?)?(?:\\?[$€£¥]\s?)?(?:(?:{_NUMBER})?(?:\\sqrt\s*\{{[^{{}}]*\}}|\\pi(?![A-Za-z])|π|√[0-9]+)"
    rf"|\\[dt]?frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|{_NUMBER}(?:\s?/\s?[0-9]+)?(?:\s?\\?%|°)?)"
)
_MORE = (
    r"(?!\$?\s*(?:[-+/^=<>(\u2212]|\*(?!\*)|\*\*[\w(]|\\(?:cdot|times|div|sqrt|[dt]?frac|pi)(?![A-Za-z]))"
    r"|[0-9\\]*[A-Za-z](?![A-Za-z]))"
)
_OPEN, _CLOSE = r"\**(?:\$|\\\(|\\\[)?\**\s*", r"\**(?:\s*(?:\$|\\\)|\\\]))?\**"
_UNIT = r"(?:\s?(?!(?:and|or)\b)(?:[A-Za-z]{2,15}|\\text\s*\{(?!\s*,?\s*(?:and|or)\b)[^{}]*\}))?"
# The value and what comes behind are atomic: `12 + 3` must not be read as a 1.
_ITEM = rf"{_OPEN}(?:(?:[A-Za-z](?:_\{{?\w{{1,5}}\}}?)?)\s*=\s*)?(?:\$\s*)?(?>{_VALUE})"
_ITEM = rf"{_ITEM}(?!\.?[0-9]){_MORE}(?>{_CLOSE})(?>{_UNIT})"
_WORD = r"(?:and|or)(?:\s+(?:also|else|possibly|maybe|perhaps))?"
_LINK = (
    rf"(?:\s*(?:,|;|\\text\s*\{{\s*,\s*\}})\s*(?:{_WORD}\s+)?|\s+{_WORD}\s+|\s*\\text\s*\{{\s*,?\s*{_WORD}\s*\}}\s*)"
)
_LIST = re.compile(rf"(?<![\w.\\/^({{\[])(?>{_ITEM})(?:{_LINK}(?>{_ITEM}))+")
_PARTS = re.compile(
    rf"(?P<name>(?<![A-Za-z])[A-Za-z](?:_\{{?\w{{1,5}}\}}?)?\s*=\s*)?(?:\$\s*)?(?P<value>{_VALUE}){_CLOSE}(?P<unit>{_UNIT})"
)
# What ends with the last digit of a list: a link, and no word between them.
_LINKED = re.compile(
    r"(?:\b(?:and|or)\b(?:\s+(?:also|else|possibly|maybe|perhaps)\b)?|[,;](?![0-9]))"
    r"(?:[^A-Za-z;]|\\[a-z]+|[A-Za-z](?![A-Za-z]))*$"
)
_JOINED = re.compile(r"\b(?:and|or)\b")
_LEADS_TO_LIST = re.compile(r"(?:[=:]|\b(?:are|is|be|either|both))[\s$*]*$|^[\s$*]*$|\n[\s$*]*$")
_COMPUTES = re.compile(r"[-+*/×÷^\u2212][\s$]*$")
_DIGIT = re.compile(r"[0-9]")
_LAST_DIGIT = re.compile(r"([0-9])[^0-9]*$")
_SEARCHED = 200
"""Characters of a text that are searched for a list."""
_APART = 60
"""The last item's number stands so many characters or fewer behind the word or comma before it."""


def listed(text: str, last: bool) -> list[str] | None:
    """Return the items of the list that holds a text's last (or first) number; None: that number stands alone.

    Items are joined by `and` or `or`, or each has a name (`x = 3, y = 5`); at a text's end commas are enough where the
    list comes after `=`, `:`, `are` and the like. None are several spellings of a number (`0.6 or 60%`), items of
    different kinds (`5 people and 12 apples`), and what belongs to a formula (`y = 2x + 1 and x = 3`).
    """
    text = text[-_SEARCHED:] if last else text[:_SEARCHED]
    if last:
        end = _LAST_DIGIT.search(text)
        if end is None or not _LINKED.search(text[max(0, end.start() - _APART) : end.end(1)]):
            return None
    lists = list(_LIST.finditer(text)) if last else [_LIST.search(text)]
    found = lists[-1] if lists else None
    if found is None or _DIGIT.search(text[found.end() :] if last else text[: found.start()]):
        return None
    items = list(_PARTS.finditer(found[0]))
    named, units = [bool(item["name"]) for item in items], {item["unit"].strip() for item in items} - {""}
    before = text[: found.start()]
    if (
        len(items) < 2
        or (any(named) and not named[0])
        or (len(units) > 1 and not all(named))
        or _COMPUTES.search(before)
    ):
        return None
    commas = last and not any(named[1:]) and (named[0] or _LEADS_TO_LIST.search(before))
    if not (_JOINED.search(found[0]) or all(named) or commas):
        return None
    values = [read_number(item["value"]) for item in items]
    if values[0] is not None and all(value is not None and same_value(values[0], value) for value in values):
        return None
    return [(item["name"] or "") + item["value"] for item in items]
