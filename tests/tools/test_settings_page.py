"""docs/settings.md is what the settings say."""

import runpy
from pathlib import Path

from spmd_rl.config.config import Config
from spmd_rl.config.fields import knobs
from spmd_rl.config.serving import ChatConfig, EvaluateConfig

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "tools" / "make_settings_page.py"))


def test_the_page_is_what_the_settings_say():
    assert (ROOT / "docs" / "settings.md").read_text() == MADE["page"](), "python tools/make_settings_page.py"


def test_every_setting_is_on_it_with_its_explanation():
    rows = {line.split("`")[1]: line for line in MADE["page"]().splitlines() if line.startswith("| `")}
    assert rows.keys() == {name for kind in (Config, EvaluateConfig, ChatConfig) for name in knobs(kind)}
    assert [name for name, row in rows.items() if row.endswith("|  |")] == []
