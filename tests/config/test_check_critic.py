"""Settings of PPO that cannot work are refused before anything starts, with the setting and the way out."""

import json

import pytest

from spmd_rl.config.check import check, notes
from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.loading import load_config
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.runtime.startup import configure

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
TWO = SCORES | {"id2label": {"0": "a", "1": "b"}}
KL = "--algorithm.kl_coefficient 0.01 --algorithm.kl_in_reward True "
ADAPTIVE = "--algorithm.kl_control adaptive "


@pytest.fixture
def words(tmp_path):
    """Return the command line of a run; the critic begins as the policy's directory, or as one of `changes`."""

    def made(arguments="", advantage="gae", **changes):
        for name, content in (("policy", {}), ("critic", changes)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | content))
        argv = ["--model.path", str(tmp_path / "policy"), "--run.dir", str(tmp_path / "run")]
        argv += ["--run.tensorboard", "False", "--algorithm.advantage", advantage]
        argv += ["--critic.path", str(tmp_path / "critic")] if changes else []
        return [*argv, *arguments.split()]

    return made


@pytest.fixture
def problems(words, tmp_path):
    def found(arguments="", world_size=1, **changes):
        config = load_config(words(arguments, **changes))
        return [str(problem) for problem in check(config, world_size, read_model_shape(tmp_path / "policy"))]

    return found


def test_a_critic_begins_as_the_policy_as_another_model_or_as_a_reward_model(problems, words, tmp_path):
    assert problems() == problems(**SCORES) == problems(num_hidden_layers=3) == []
    assert problems("--critic.label 1", **TWO) == []
    own = read_critic(load_config(words()))
    assert own.new_head and own.shape.head == "value" and own.shape.labels == 1 and own.knob == "model.path"
    assert own.described() == f"critic: begins as {tmp_path / 'policy'}, with a value head of zeros"
    scorer = read_critic(load_config(words("--critic.label 1", **TWO)))
    assert not scorer.new_head and scorer.shape is scorer.stored and scorer.label == 1
    assert scorer.described().endswith("a Qwen2ForSequenceClassification, whose output 1 is the value")


def test_one_sample_a_prompt_is_enough_for_a_critic_alone(problems):
    assert problems("--algorithm.samples_per_prompt 1") == []
    (problem,) = problems("--algorithm.samples_per_prompt 1", advantage="grpo")
    assert problem.startswith("algorithm.samples_per_prompt = 1")


@pytest.mark.parametrize(
    "arguments, changes, said",
    [
        ("--algorithm.gamma 1.1", {}, "algorithm.gamma = 1.1: out of range; it must be at least 0 and at most 1"),
        ("--algorithm.lam -0.1", {}, "algorithm.lam = -0.1: out of range"),
        ("--algorithm.lam nan", {}, "algorithm.lam = nan: not a finite number"),
        ("--algorithm.value_clip -1", {}, "algorithm.value_clip = -1.0: out of range"),
        ("--train.epochs 0", {}, "train.epochs = 0: out of range"),
        ("--train.skipped_rate_factor 0", {}, "train.skipped_rate_factor = 0.0: out of range"),
        ("--train.skipped_rate_factor 1.5", {}, "train.skipped_rate_factor = 1.5: out of range"),
        (
            "--algorithm.samples_per_prompt 1 --algorithm.curation teaching --algorithm.refill_attempts 2",
            {},
            "algorithm.curation = teaching: a group of one sample",
        ),
        ("--parallel.tensor 3", {}, "parallel.tensor x parallel.pipeline = 3 x 1: does not divide the 8 ranks"),
        (
            "--algorithm.kl_in_reward True",
            {},
            "algorithm.kl_in_reward = True: there is no reference to diverge from",
        ),
        (
            ADAPTIVE + KL.replace("0.01", "0"),
            {},
            "algorithm.kl_control = adaptive: algorithm.kl_coefficient = 0.0 stays",
        ),
        (
            ADAPTIVE + "--algorithm.kl_coefficient 0.1",
            {},
            "= adaptive: it leads the KL coefficient (beta) of the rew",
        ),
        (KL + ADAPTIVE + "--algorithm.kl_horizon 51.2", {}, "algorithm.kl_horizon = 51.2: a step of 256 samples could"),
        (KL + ADAPTIVE + "--algorithm.kl_target 0", {}, "algorithm.kl_target = 0.0: out of range"),
        ("--critic.learning_rate 1e-6 --critic.min_learning_rate 1e-5", {}, "critic.min_learning_rate = 1e-05: above"),
        ("--critic.learning_rate_warmup_steps 101", {}, "critic.learning_rate_warmup_steps = 101: the run ends after"),
        (
            "--critic.warmup_steps 100",
            {},
            "critic.warmup_steps = 100: the run ends after train.steps = 100, and the po",
        ),
        ("--critic.adam_beta1 1", {}, "critic.adam_beta1 = 1.0: out of range"),
        ("--critic.path nowhere", {}, "critic.path = nowhere: there is no such directory"),
        ("", {"architectures": ["BertModel"]}, "config.json is BertModel; supported are"),
        ("", {"vocab_size": 99}, "it has embeddings for 99 tokens, the policy has 100; the critic reads the policy's"),
        ("", TWO, "critic.label: not set, and "),
        ("--critic.label 2", TWO, "has 2 outputs; it can be 0 or 1"),
        ("--critic.label 1", {"num_hidden_layers": 3}, "has 1 output; it can be 0"),
        ("", SCORES | {"max_position_embeddings": 512}, "the critic has 512 positions; lower one of them"),
        ("--parallel.tensor 8", SCORES, "parallel.tensor = 8: the critic has 4 attention heads"),
        ("--parallel.pipeline 4", SCORES | {"num_hidden_layers": 3}, "parallel.pipeline = 4: the critic has 3 layers"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_and_the_way_out(problems, arguments, changes, said):
    found = problems(arguments, 8, **changes)
    assert any(said in problem for problem in found), found


def test_a_critic_that_nothing_would_come_of_is_refused(problems):
    (found,) = problems(KL + ADAPTIVE, advantage="grpo", **SCORES)
    assert found.startswith("critic.path = ")
    assert "set algorithm.advantage to gae and start spmd_rl.ppo, or leave it out" in found


def test_the_weight_of_a_divergence_is_looked_at_whatever_the_advantage(problems):
    assert problems(KL + ADAPTIVE, advantage="reinforce_plus_plus") == []
    (found,) = problems(KL + ADAPTIVE + "--algorithm.kl_horizon 5", advantage="reinforce_plus_plus")
    assert found.startswith("algorithm.kl_horizon = 5.0")


def test_a_layout_of_the_critics_own_is_refused_by_name(words):
    with pytest.raises(ValueError, match="critic.parallel.tensor: there is no such setting; did you mean parallel.ten"):
        load_config(words("--critic.parallel.tensor 2"))


@pytest.mark.parametrize(
    "name", ["parallel.pipeline", "train.tokens_per_microbatch", "train.minibatches", "train.recompute"]
)
def test_what_the_critic_shares_with_the_policy_is_refused_with_the_setting_of_both(words, name):
    own = f"critic.{name.removeprefix('train.')}"
    said = f"{own}: there is no such setting; did you mean {name}? The critic has the policy's layout, micro-batches"
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        load_config(words(f"--{own} 2"))


def test_each_loop_refuses_the_settings_of_the_other(words):
    for critic, advantage, said in (
        (
            True,
            "grpo",
            "algorithm.advantage = grpo: this program learns from a critic's values; set it to gae, or start",
        ),
        (False, "gae", "algorithm.advantage = gae: this program has no critic; start spmd_rl.ppo, or take another"),
    ):
        with pytest.raises(ValueError, match="algorithm.advantage") as refused:
            configure(words(advantage=advantage), critic=critic)
        assert said in str(refused.value)


def test_a_target_that_no_policy_reaches_is_worth_a_note(words):
    (note,) = (one for one in notes(load_config(words(KL + ADAPTIVE)), 1) if "kl_target" in one)
    assert note.startswith("algorithm.kl_target = 100: ")
    assert not [
        one for one in notes(load_config(words(KL + ADAPTIVE + "--algorithm.kl_target 0.05")), 1) if "kl_t" in one
    ]


QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
SIZES = {
    "ppo_qwen25_7b_a2": (8, (28, 3584, 28, 4, 18944, 152064)),
    "ppo_qwen25_32b_a3": (32, (64, 5120, 40, 8, 27648, 152064)),
    "ppo_demo_smollm2_cpu": (2, (30, 576, 9, 3, 1536, 49152)),
}
NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@pytest.mark.parametrize("name", SIZES)
def test_the_configurations_of_ppo_that_come_with_the_program_have_no_problem(tmp_path, name):
    ranks, sizes = SIZES[name]
    for place, content in (("policy", {}), ("critic", SCORES)):
        (tmp_path / place).mkdir()
        config = QWEN | dict(zip((*NAMES, "vocab_size"), sizes, strict=True)) | content
        (tmp_path / place / "config.json").write_text(json.dumps(config))
    words = ["--config", f"configs/{name}.yaml", "--model.path", str(tmp_path / "policy")]
    config = load_config([*words, "--run.dir", str(tmp_path / "run"), "--run.tensorboard", "False"])
    if config.critic.path:
        config = load_config([*words, "--run.tensorboard", "False", "--critic.path", str(tmp_path / "critic")])
    assert check(config, ranks, read_model_shape(tmp_path / "policy")) == []
    assert config.program == "spmd_rl.ppo"
