"""docs/mindspeed.md has the glossary that the command line answers from."""

import runpy
from pathlib import Path

from spmd_rl.config.foreign.mindspeed_names import MINDSPEED

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "tools" / "make_mindspeed_page.py"))


def test_the_glossary_is_the_table_of_names():
    text = (ROOT / "docs" / "mindspeed.md").read_text(encoding="utf-8")
    assert text == MADE["page"](text), "python tools/make_mindspeed_page.py"
    assert [row.name for row in MINDSPEED.rows if f"`{row.name}`" not in text] == []


def test_every_page_that_it_leads_to_is_there():
    import re

    text = (ROOT / "docs" / "mindspeed.md").read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
