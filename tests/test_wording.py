"""Test that people read plain words of the field: no phrase of a list is in source, help, docs or configurations."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What is said in place of each stands in brackets.
AVOIDED = (
    r"tells? the story",  # controls the run
    r"has not got on|\bstillness\b|signs? of life",  # no progress, idle time, heartbeat
    r"\btook up\b|\bgoes on after step\b",  # loaded, resuming from
    r"the run in short",  # summary
    r"beside training",  # in the background
    r"\b(?:is|are) spell(?:ed|t)\b|how .* spelled",  # formatted
    r"\bmend(?:s|ed|ing)?\b",  # fix
    r"made on the spot",  # generated
    r"[Rr]anks that share every layer",  # tensor-parallel size (TP)
    r"[Ww]eight of the divergence",  # KL coefficient (beta)
    r"to suffer\b",  # fault injection
)
SEARCHED = (r"\bTP\b", r"\bPP\b", r"\bEP\b", r"\bCP\b", r"\bDP\b", r"\bKL\b", "beta", "[Bb]atch size")
NAMED = ("gsm8k", "qwen_r1")


def test_no_phrase_that_people_stumble_over_is_left():
    places = (*(ROOT / "spmd_rl").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml"), *(ROOT / "docs").glob("*.md"))
    pages = (*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "tools").glob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in (*places, *pages)
        for phrase in AVOIDED
        for found in re.finditer(phrase, path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


@pytest.mark.long
def test_the_help_can_be_searched_for_the_fields_words_and_lists_what_has_a_name():
    from spmd_rl.rewards.rule_table import RULES

    command = [sys.executable, "-m", "spmd_rl.grpo", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [word for word in (*SEARCHED, *NAMED, *RULES) if not re.search(word, said)] == []
