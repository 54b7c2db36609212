"""What this project keeps to beside its code: every file of tests stands in CONTRIBUTING.md's table of laws."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_file_of_tests_is_in_the_table_of_laws_once():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## The laws")[2]
    named = [place for row in table.splitlines() for place in re.findall(r"`(tests/\S+)`", row.partition(" set |")[0])]
    named = [place for place in named if place.endswith("/") or place.endswith(".py")]
    assert [place for place in named if not (ROOT / place).exists()] == []
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [file for file in files if not any(file.startswith(place) for place in named)] == []
