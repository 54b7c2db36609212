"""Find how far a formula reaches that stands in prose without delimiters."""

import re
import unicodedata
from functools import cache

from spmd_rl.rewards.math_equality.numbers import read_number

_STYLE = (
    r"(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf)|boxed|fbox|bf|rm|(?:big|Big|bigg)[lr]?|left|right|displaystyle)"
)
_STOP_COMMAND = re.compile(r"\\(?:approx|simeq|[lL]?[rR]ightarrow|implies|iff|to|therefore|q?quad|text|[(\[\])])$")
_IN_FORMULAS = frozenset("sqrt log ln sin cos tan cot sec csc exp pi mod".split())
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:[.,][0-9]+)*|[A-Za-z]+|\*\*|\S")
_OPEN, _CLOSE = frozenset(["(", "[", "{", r"\{"]), frozenset([")", "]", "}", r"\}"])
# What makes more of some characters than a number: a command, a power, a root, a name in a product, a ratio.
_STRUCTURE = re.compile(
    rf"\\(?!{_STYLE}(?![A-Za-z])|times|cdot|div|[^A-Za-z{{])|[\^√π]|(?<![A-Za-z])(?:sqrt|log|ln|sin|cos|tan|pi)(?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z]\s*[-/*+]\s*[0-9(\\]|[0-9)}]\s*[-/*+]\s*[A-Za-z](?![A-Za-z])"
    r"|[0-9)][a-bin-rtx-z](?![A-Za-z])|[0-9](?::|\s+:\s+)[0-9]|\*\*|[0-9}]_|[A-Za-z]_"
)
_RATIO = re.compile(r"(?:.?[0-9]:|[0-9]\s+:\s+)[0-9]")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_BRACKET = re.compile(r"[(\[{]([^()\[\]{}]*[,;][^()\[\]{}]*)\\?[)\]}]")
_ITEM = re.compile(r"\s*(?:[A-Za-z]\w{0,2}\s*=\s*)?[-+]?[^\sA-Za-z]*\s*")


def formula_around(text: str, start: int, end: int) -> str | None:
    """Return the formula, root, fraction, power or tuple that holds the number `text[start:end]`; None: none does."""
    left = text.rfind("\n", 0, start) + 1
    right = text.find("\n", end)
    line = text[left : right if right >= 0 else len(text)]
    if len(line) == end - start or not (_STRUCTURE.search(line) or _BRACKET.search(line)):
        return None
    low, high = _reach(line, start - left)
    found = line[low:high].strip(" .,;:!?*`")
    return found if _STRUCTURE.search(found) or any(_is_tuple(m[1]) for m in _BRACKET.finditer(found)) else None


def _reach(line: str, position: int) -> tuple[int, int]:
    """Return the places around `position` at which no formula goes on: a word, an equals sign, a comma."""
    low, depths = 0, []
    for token in _TOKEN.finditer(line):
        word = token[0]
        if word in _CLOSE and depths:
            depths.pop()
        if _stops(line, token, bool(depths)):
            if token.start() >= position:
                return low, token.start()
            low, depths = token.end(), []
        elif word in _OPEN:
            depths.append(word)
    return low, len(line)


def _stops(line: str, token: re.Match[str], inside: bool) -> bool:
    word = token[0]
    if word[0].isalpha():
        return len(word) > 1 and word not in _IN_FORMULAS and not inside and not _of_command(line, token.start())
    if word == "**":  # a power of Python's, or bold face
        return not (line[: token.start()][-1:].isalnum() and line[token.end() :][:1].isalnum())
    if word in ("=", "≈", "$", "<", ">"):
        return True
    if word == ":":  # a ratio, 3:4 or 3 : 4, or the end of what is said before it, 3: 4
        return not _RATIO.match(line, max(0, token.start() - 2))
    if word == ".":
        return not inside and not line[token.end() :][:1].isdigit()
    return not inside and (word in (",", ";") or bool(_STOP_COMMAND.match(word)))


def _of_command(line: str, position: int) -> bool:
    return line[:position].endswith("{")


def _is_tuple(inner: str) -> bool:
    items = re.split("[,;]", inner)
    return read_number(inner) is None and all(item.strip() and _ITEM.fullmatch(item) for item in items)


def is_list_of_numbers(text: str) -> bool:
    """Recognise `3 or 5` and `3, 5`, not 1,234."""
    items = re.split(r"\s*[,;]\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+", text.strip(" .$"))
    return len(items) > 1 and all(read_number(item) for item in items)


def western(text: str) -> str:
    """Return `text` with the digits 0 to 9 for those of other scripts, and ASCII for full-width characters."""
    return text if text.isascii() else _FOREIGN.sub(lambda match: _ascii(match[0]), text)


@cache
def _ascii(character: str) -> str:
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    return str(unicodedata.decimal(character, character))
