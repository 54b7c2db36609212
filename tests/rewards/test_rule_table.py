from functools import partial

import pytest

from spmd_rl.config.functions import labels
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.rule_table import RULES, is_async, is_batched, resolve


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


def test_rules_that_mindspeed_rl_users_know_are_there():
    names = "acc format step strict_format base_acc math_17k_acc acc_for_dapo acc_for_ppo math_verify_reward"
    assert set(names.split()) <= set(RULES)


def test_options_follow_a_rule_of_ours_or_the_users(tmp_path):
    (tmp_path / "rules.py").write_text("def mine(sample, scale=1.0, word='x'): return scale * len(word)\n")
    sample = RewardSample("q", "four", "a")
    assert resolve(f"{tmp_path}/rules.py:mine(scale=2, word='yes')")(sample) == 6.0
    assert resolve(f"{tmp_path}/rules.py:mine (word=no)")(sample) == 2.0
    assert resolve("math_answer(extract=boxed|final)")(RewardSample("q", "So 4", "4")).correct


@pytest.mark.parametrize(
    "name, reason",
    [
        ("overlong(buffer=512)", "it has no option 'buffer' (it has: buffer_tokens, limit_tokens, factor)"),
        ("overlong(buffer_tokens=many)", "buffer_tokens = 'many' should be of type int"),
        ("overlong(512)", "'512' is not name=value"),
        ("overlong(buffer_tokens=-1)", "are 0 or more"),
        ("overlong(buffer_tokens=9, limit_tokens=8)", "buffer_tokens = 9 is more than limit_tokens = 8"),
        ("repetition(ngram=0)", "ngram = 0 should be 1 or more"),
        ("math_answer(extract=box)", "not looked for in 'box'"),
        ("exact(case=true)", "it has no option 'case' (it has: none)"),
        ("overlog(buffer_tokens=1)", "there are math_answer"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_anything_is_graded(name, reason):
    with pytest.raises(ValueError) as error:
        resolve(name)
    assert repr(name) in str(error.value) and reason in str(error.value)


def test_metrics_call_a_rule_by_its_name_unless_two_have_the_same():
    assert labels(["acc", "overlong(buffer_tokens=5)"]) == {"acc": "acc", "overlong(buffer_tokens=5)": "overlong"}
    assert labels(["a/b.py:f(x=1)", "acc"]) == {"a/b.py:f(x=1)": "f", "acc": "acc"}
    assert labels(["length", "length(limit_tokens=5)"]) == {n: n for n in ("length", "length(limit_tokens=5)")}


def test_a_rule_for_lists_and_an_asynchronous_rule_are_told_by_their_signature():
    async def one(sample): ...
    async def several(samples): ...
    def many(batch: list[RewardSample]): ...
    def plain(sample: RewardSample, samples=3): ...

    found = [(is_async(rule), is_batched(rule)) for rule in (one, several, many, plain, partial(several))]
    assert found == [(True, False), (True, True), (False, True), (False, False), (True, True)]
