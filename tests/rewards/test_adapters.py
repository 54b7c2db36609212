"""Reward functions in the signatures of TRL and verl, as rules."""

import asyncio

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.rule_table import is_async, is_batched, preparations, resolve
from spmd_rl.runtime.sources import sources

THEIRS = """
def trl(prompts, completions, answer, level, **kwargs):
    assert sorted(kwargs) == ["completion_ids"]
    return [float(a in c) + l for c, a, l in zip(completions, answer, level)]

def chat(completions, **kwargs):
    return [1.0 if c[0]["content"] == "4" else None for c in completions]

async def later(completions, scale=1.0):
    return [scale * len(c) for c in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict"):
    return float(method == "strict" and solution_str == ground_truth and extra_info["index"] == 7)

def told(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

def together(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [s == g for s, g in zip(solution_strs, ground_truths)]

loaded = []

def prepare():
    loaded.append(1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    return path


def sample(response, **row):
    return RewardSample(prompt="2 + 2?", response=response, answer="4", row=row, response_ids=[5])


def test_a_function_of_trl_is_given_lists_of_texts_and_columns(file):
    rule = resolve(f"trl:{file}:trl")
    assert is_batched(rule) and not is_async(rule)
    assert rule([sample("4", level=1), sample("5", level=2)]) == [2.0, 2.0]


def test_conversations_are_given_as_messages(file):
    rule = resolve(f"trl:{file}:chat")
    asked = [{"role": "user", "content": "2 + 2?"}]
    assert rule([sample("4", prompt=asked), sample("5", prompt=asked)]) == [1.0, None]


def test_an_asynchronous_function_of_trl_stays_one_and_has_options(file):
    rule = resolve(f"trl:{file}:later(scale=2.0)")
    assert is_batched(rule) and is_async(rule)
    assert asyncio.run(rule([sample("four")])) == [8.0]


def test_a_function_of_verl_is_given_one_answer_with_what_its_row_says(file):
    rule = resolve(f"verl:{file}:compute_score")
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "four"}, "extra_info": {"index": 7}}
    assert not is_batched(rule) and rule(sample("four", **row)) == 1.0
    assert resolve(f'verl:{file}:compute_score(method="flexible")')(sample("four", **row)) == 0.0


def test_what_verl_calls_acc_and_pred_is_a_cause_and_an_answer(file):
    assert resolve(f"verl:{file}:told")(sample("4")) == Grade(0.5, "correct", "4")


def test_a_function_of_verls_batches_is_given_lists(file):
    rule = resolve(f"verl:{file}:together")
    assert is_batched(rule) and rule([sample("4"), sample("5")]) == [True, False]


def test_the_file_behind_an_adapter_is_prepared_and_remembered(file):
    [prepare] = preparations([resolve(f"verl:{file}:told")])
    assert prepare.__name__ == "prepare"
    assert list(sources([], {f"verl:{file}:told(a=1)": 1.0})) == [f"rule {file}"]


def test_a_function_that_is_not_there_is_refused_as_any_other(file):
    with pytest.raises(ConfigError, match="it has no function 'other'"):
        resolve(f"trl:{file}:other")
