import pytest

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.table import RULES, resolve


def test_the_built_in_rules_go_by_their_names():
    assert {"math_answer", "format", "exact"} < set(RULES)
    assert all(resolve(name) is rule for name, rule in RULES.items())


def test_a_rule_comes_from_a_file_or_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("import json\ndef shortness(sample):\n    return 1.0 / len(sample.response)\n")
    (tmp_path / "house_rules.py").write_text("def zero(sample):\n    return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sample = RewardSample("q", "four", "a")
    assert resolve(f"{tmp_path}/json.py:shortness")(sample) == 0.25
    assert resolve("house_rules:zero")(sample) == 0
    monkeypatch.chdir(tmp_path)
    assert resolve("json.py:shortness")(sample) == 0.25


@pytest.mark.parametrize(
    "name, tried, reason",
    [
        ("maths_answer", "looked among the built-in rules", "there are math_answer, format, exact"),
        ("nowhere.py:f", "loaded the file /", "there is no such file"),
        ("no_such_package.rules:f", "imported the module no_such_package.rules", "No module named 'no_such_package'"),
        ("os.path:jion", "imported the module os.path", "it has no function 'jion'"),
        ("os:sep", "imported the module os", "it has no function 'sep'"),
        ("bad.py:f", "loaded the file /", "ZeroDivisionError: division by zero"),
        ("script.py:f", "loaded the file /", "SystemExit: 3"),
        ("typo.py:f", "loaded the file /", "SyntaxError"),
    ],
)
def test_a_rule_that_cannot_be_used_is_named_with_what_was_tried_and_why(name, tried, reason, tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    (tmp_path / "typo.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        resolve(name)
    assert repr(name) in str(error.value) and tried in str(error.value) and reason in str(error.value)
