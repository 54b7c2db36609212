"""Write a character that no font of this machine has as its number: an empty box says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHINESE = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "AR PL UMing CN",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
)
"""Families that have Chinese characters, best first."""
_FAMILY = "DejaVu Sans"
"""Comes with matplotlib."""


def families() -> list[str]:
    """Return the families that pictures are written in: of those that know Chinese the ones that are here."""
    from matplotlib import font_manager

    here = {font.name for font in font_manager.fontManager.ttflist}
    return [_FAMILY, *(family for family in CHINESE if family in here)]


def number_missing(figure: Figure, fonts: Sequence[str]) -> set[str]:
    """Write the characters of a figure's texts that none of the families has as numbers; return them."""
    from matplotlib.text import Text

    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and not text.get_text().isascii()]
    if not texts:
        return set()
    known = characters(fonts)
    missing = {character for text in texts for character in text.get_text() if character not in known} - {"\n"}
    for text in texts:
        text.set_text("".join(_number(each) if each in missing else each for each in text.get_text()))
    return missing


def characters(fonts: Sequence[str]) -> set[str]:
    """Return the characters that a font of these families has."""
    from matplotlib.font_manager import findfont, get_font

    found = (get_font(findfont(family, fallback_to_default=False)).get_charmap() for family in fonts)
    return {chr(code) for charmap in found for code in charmap}


def remark(missing: set[str]) -> list[str]:
    """Say which characters are numbers in the pictures, in a line."""
    if not missing:
        return []
    few = "".join(sorted(missing)[:8]) + (" ..." if len(missing) > 8 else "")
    return [f"no font of this machine has {few}: written as numbers; a font such as Noto Sans CJK SC shows them"]


def _number(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()
