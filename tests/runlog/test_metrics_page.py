"""docs/metrics.md has every metric that is promised, and none that nothing logs."""

import itertools
import re
from pathlib import Path

from promised import metric_patterns, promised

ROOT = Path(__file__).resolve().parents[2]


def test_every_promised_metric_is_on_the_page():
    patterns = [re.compile(pattern) for pattern in metric_patterns()]
    assert [name for name in promised("metrics") if not any(p.fullmatch(name) for p in patterns)] == []


def test_every_metric_of_mindspeeds_pages_is_on_ours_as_they_spell_it():
    patterns = [re.compile(pattern) for pattern in metric_patterns()]
    names = {line.split()[1] for line in promised("mindspeed")}
    assert len(names) > 50 and {name for name in names if not any(p.fullmatch(name) for p in patterns)} == set()


def test_every_metric_of_the_page_is_logged_by_something():
    source = "\n".join(path.read_text() for path in (ROOT / "spmd_rl").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    kept = set(promised("metrics"))
    said = [re.sub(r"\[\^/\]\+|\\", "", pattern) for pattern in metric_patterns()]
    for name in (name for name in said if name not in kept):
        parts = [part for part in re.split(r"[/_]", name) if part and not re.search(r"[.*+]", part)]
        assert all(part in words or any(part in word for word in words) for part in parts), name


def test_the_names_that_mindspeed_spells_in_two_ways_are_both_there():
    from spmd_rl.config.names import ALIASES

    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in itertools.chain(*ALIASES.items()) if f"`{name}`" not in page] == []
