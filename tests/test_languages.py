"""Pages in two languages have the same commands and links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [
    (page.with_name(page.name.replace(".zh.", ".")), page)
    for page in (ROOT / "README.zh.md", *ROOT.glob("docs/*.zh.md"))
]


def blocks(text: str) -> list[str]:
    """Return the commands without their comments, which are in the page's language, and without outputs."""
    found = re.findall(r"^```\w*\n.*?^```$", text, re.DOTALL | re.MULTILINE)
    found = [block for block in found if not block.startswith("```\n")]
    return [re.sub(r" *# .*", "", block) for block in found]


def links(text: str) -> list[str]:
    """Return where the page leads to, the other languages of pages left out."""
    text = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return sorted(target for target in targets if target.replace(".zh.", ".") not in own_names())


def own_names() -> set[str]:
    return {english.name for english, _ in PAIRS}


@pytest.mark.parametrize("english, chinese", PAIRS, ids=lambda page: page.name)
def test_both_languages_have_the_same_commands_and_links(english, chinese):
    one, other = english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")
    assert blocks(one) == blocks(other)
    assert links(one) == links(other)
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (one, other)]
    assert headings[0] == headings[1]
