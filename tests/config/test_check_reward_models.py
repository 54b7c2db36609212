"""Reward models that cannot be used are refused before anything starts, with the setting and the way out."""

import json

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.loading import load_config

CONFIG = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "id2label": {"0": "good"},
}
EXPERTS = {
    "architectures": ["Qwen3MoeForSequenceClassification"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.fixture
def problems(tmp_path):
    def found(arguments="", world_size=1, **changes):
        directory = tmp_path / "scorer"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        argv = ["--model.path", str(tmp_path), "--run.dir", str(tmp_path / "run"), "--run.tensorboard", "False"]
        argv += ["--reward.models.good.path", str(directory)]
        return [str(problem) for problem in check(load_config([*argv, *arguments.split()]), world_size, None)]

    return found


def test_a_model_that_scores_has_no_problem_with_rules_or_alone(problems):
    assert problems() == []
    assert problems("--reward.rules") == []
    assert problems("--reward.rules math_answer 0 --reward.models.good.clip -1.5 2") == []


def test_the_score_of_a_model_that_is_only_measured_is_no_reward(problems):
    (problem,) = problems("--reward.rules --reward.models.good.weight 0")
    assert problem.startswith("reward.rules = {}: every reward would be 0")


@pytest.mark.parametrize(
    "arguments, changes, said",
    [
        ("", {"architectures": ["Qwen2ForCausalLM"]}, "config.json is Qwen2ForCausalLM, which is not one that scores"),
        ("", {"architectures": ["BertForSequenceClassification"]}, "a reward model is one of LlamaForSequence"),
        ("", {"architectures": []}, "the architecture in its config.json is None"),
        ("", {"hidden_size": "wide"}, "config.json cannot be understood"),
        ("--reward.models.good.path nowhere", {}, "good.path = nowhere: there is no such directory"),
        ("--reward.models.bad.weight 1", {}, "reward.models.bad.path: not set"),
        ("", {"id2label": {"0": "a", "1": "b"}}, "reward.models.good.label: not set, and "),
        ("", {"id2label": {"0": "a", "1": "b"}}, "has 2 outputs; say which one is the score: 0 or 1"),
        ("--reward.models.good.label 1", {}, "reward.models.good.label = 1: "),
        ("--reward.models.good.clip 1", {}, "reward.models.good.clip = 1.0: it takes two numbers"),
        ("--reward.models.good.clip 2 1", {}, "reward.models.good.clip = 2.0 1.0: it takes two numbers"),
        ("--reward.models.good.clip nan 1", {}, "reward.models.good.clip = nan 1.0: it takes two numbers"),
        ("--reward.models.good.weight inf", {}, "reward.models.good.weight = inf: not a finite number"),
        ("--reward.models.good.tokens_per_microbatch 0", {}, "reward.models.good.tokens_per_microbatch = 0"),
        ("--reward.models.good.weight 1 --reward.rules good 1", {}, "a rule is called good too"),
        ("", {"max_position_embeddings": 512}, "the reward model good has 512 positions; lower one of them"),
        ("--parallel.tensor 8", {}, "parallel.tensor = 8: the reward model good has 4 attention heads"),
        ("--parallel.tensor 8", {}, "with this model it can be 1, 2 or 4"),
        ("--parallel.context 8", {}, "parallel.context = 8: the reward model good has 4 attention heads, which"),
        ("--parallel.pipeline 8", {}, "parallel.pipeline = 8: the reward model good has 4"),
        ("--parallel.expert 4", EXPERTS, "parallel.expert = 4: the reward model good has 6 experts"),
        ("--parallel.tensor 2 --parallel.sequence False", EXPERTS, "parallel.sequence = False: the reward model good"),
    ],
)
def test_a_problem_names_the_setting_what_it_met_and_the_way_out(problems, arguments, changes, said):
    found = problems(arguments, 8, **changes)
    assert any(said in problem for problem in found), found


def test_the_policys_layout_need_not_divide_the_reward_models_layers(problems):
    assert problems("--parallel.pipeline 3", 3) == []


def test_a_broken_configuration_is_said_of_the_reward_models_path(problems, tmp_path):
    problems()
    (tmp_path / "scorer" / "config.json").write_text("{")
    argv = ["--model.path", "m", "--reward.models.good.path", str(tmp_path / "scorer")]
    found = [str(problem) for problem in check(load_config(argv), 1, None) if "scorer" in str(problem)]
    assert found and all(problem.startswith("reward.models.good.path = ") for problem in found)
