"""What a run learns from is known again when it goes on."""

from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.runtime.sources import changed_sources, sources


def prompts(*texts, source="a.jsonl"):
    return [Prompt(i, (1,), text, "7", {}, source) for i, text in enumerate(texts)]


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
