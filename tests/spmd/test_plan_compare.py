"""`plan --compare` beside tiny runs: the peak of a process is foretold within a tenth in three layouts."""

import json

import pytest
from tiny_run import make_tiny_run, tiny_rule, tiny_settings

from spmd.ranks import run_program
from spmd_rl.plan.__main__ import main
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYOUTS = [
    ("tensor", "qwen2", {"parallel": {"tensor": 2}, "rollout": {"tensor": 2}}),
    ("pipeline", "qwen2", {"parallel": {"pipeline": 2}}),
    ("experts", "qwen3_moe", {"parallel": {"expert": 2}}),
]


@pytest.mark.parametrize(("name", "family", "layout"), LAYOUTS, ids=[name for name, _, _ in LAYOUTS])
def test_the_peak_of_each_phase_is_foretold_within_a_tenth(name, family, layout, tmp_path, capsys):
    make_tiny_run(tmp_path)
    if family != "qwen2":
        make_tokenizer(make_tiny(tmp_path / "model", family))
    made = {"run": {"dir": tmp_path / name}, "train": {"steps": 3}, "evaluation": {"before": False, "after": False}}
    run_program("spmd_rl.grpo", 2, *tiny_settings(tmp_path, **made, **layout), *tiny_rule(tmp_path))
    main(["--compare", str(tmp_path / name), "--device", "cpu", "--json"])
    compared = json.loads(capsys.readouterr().out)["compared"]
    peaks = {row["name"]: row for row in compared["rows"] if row["name"].startswith("memory/")}
    print(name, compared["base_bytes"], {one: (row["ratio"], row["added_ratio"]) for one, row in peaks.items()})
    assert len(peaks) >= 5
    assert {one: row["ratio"] for one, row in peaks.items() if abs(row["ratio"] - 1) > 0.1} == {}
    moved = [row for row in compared["rows"] if row["name"].startswith("bytes/")]
    assert all(row["predicted"] == row["measured"] for row in moved)
