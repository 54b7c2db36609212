"""Test that what users hold on to stays: settings, their defaults (metrics and files: tests/spmd/test_program.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from promised import all_settings, promised
from spmd_rl import api

ROOT = Path(__file__).resolve().parents[1]


def test_no_setting_goes_or_changes_its_default():
    assert set(promised("settings")) - set(all_settings()) == set()


@pytest.mark.slow
def test_every_setting_is_promised():
    assert set(all_settings()) - set(promised("settings")) == set(), "cd tests && PYTHONPATH=.. python -m promised"


def test_what_a_users_files_import_is_there_and_costs_nothing_until_it_is_asked_for():
    assert all(getattr(api, name).__name__ == name for name in api.__all__)
    heavy = "torch", "msgspec", "spmd_rl.program", "spmd_rl.controller", "spmd_rl.rewards"
    program = f"import sys, spmd_rl.api; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_docs_import_what_is_promised_and_nothing_else():
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    blocks = "".join(re.findall(r"```python\n(.*?)```", pages, re.DOTALL))
    assert set(re.findall(r"(?:from|import) (spmd_rl[\w.]*)", blocks)) <= {"spmd_rl.api"}
    named = re.findall(r"from spmd_rl.api import (.*)", blocks)
    assert {name for line in named for name in line.split(", ")} <= set(api.__all__)
