"""Test that what a run learns from is known again when it goes on."""

from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.runtime.sources import changed_sources, sources


def prompts(*texts, source="a.jsonl", row=None, ids=(1,)):
    return [Prompt(i, ids, text, "7", row or {}, source) for i, text in enumerate(texts)]


def test_other_prompts_and_other_rules_are_refused_unless_allowed(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text("def judge(sample): return 1.0\n")
    rules = {f"{file}:judge": 1.0, "math_answer": 1.0}
    before = sources(prompts("1+6", "2+5"), rules)
    assert changed_sources(before, sources(prompts("1+6", "2+5"), rules), [], []) == ([], [])
    file.write_text("def judge(sample): return 0.0\n")
    now = sources(prompts("1+6", "2+5", "3+4"), rules)
    notes, problems = changed_sources(before, now, [], [])
    said = [str(problem) for problem in problems]
    assert not notes and len(said) == 2
    assert "data.source = a.jsonl" in said[0] and "2 prompts, digest" in said[0] and "3 prompts, digest" in said[0]
    assert f"reward.rules = {file}" in said[1] and "add reward.rules to checkpoint.resume_allow" in said[1]
    notes, problems = changed_sources(before, now, [], ["data.source", "reward."])
    assert len(notes) == 2 and not problems


def test_a_change_that_a_setting_has_told_is_said_and_an_old_checkpoint_knows_nothing():
    before, now = sources(prompts("1+6"), {}), sources(prompts("1+6", "2+5", source="b.jsonl"), {})
    notes, problems = changed_sources(before, now, ["data.source"], [])
    assert len(notes) == 2 and not problems
    assert changed_sources({}, now, [], []) == ([], [])


def test_columns_that_rules_are_given_and_token_ids_are_known_again_too():
    before = sources(prompts("1+6", "2+5", row={"tests": ["f(1) == 7"], "level": 1}), {})
    columns = sources(prompts("1+6", "2+5", row={"level": 1, "tests": ["f(1) == 8"]}), {})
    [problem] = changed_sources(before, columns, [], [])[1]
    assert str(problem).startswith("data.source = a.jsonl, the columns that rules are given: it holds other things")
    ordered = sources(prompts("1+6", "2+5", row={"level": 1, "tests": ["f(1) == 7"]}), {})
    assert changed_sources(before, ordered, [], []) == ([], [])
    plain = sources(prompts("1+6", "2+5"), {})
    tokens = sources(prompts("1+6", "2+5", ids=(1, 2)), {})
    [problem] = changed_sources(plain, tokens, [], [])[1]
    assert str(problem).startswith("data.template = a.jsonl, the token ids of its prompts: it holds other things")
    assert changed_sources(plain, tokens, [], ["data.template"])[1] == []
    assert len(changed_sources(plain, sources(prompts("other", ids=(3,)), {}), [], [])[1]) == 1, "said once"
    old = {name: said for name, said in plain.items() if name.startswith("prompts ")}
    assert changed_sources(old, tokens, [], []) == ([], []), "a checkpoint without these digests"


def test_a_rule_in_a_module_is_known_again_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "my_judges" / "math"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "sums.py").write_text("def judge(sample, scale=1): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    rules = {"my_judges.math.sums:judge(scale=2)": 1.0, "no_such.module:judge": 1.0, "exact": 1.0}
    before = sources(prompts("1+6"), rules)
    assert [name for name in before if name.startswith("rule ")] == ["rule my_judges.math.sums"]
    (package / "sums.py").write_text("def judge(sample, scale=1): return 0.0\n")
    [problem] = changed_sources(before, sources(prompts("1+6"), rules), [], [])[1]
    assert str(problem).startswith("reward.rules = my_judges.math.sums: it holds other things")
    assert changed_sources(before, sources(prompts("1+6"), {"exact": 1.0}), [], []) == ([], []), "a setting says so"
