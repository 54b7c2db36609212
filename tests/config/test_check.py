"""Everything that cannot work is said before anything starts."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import spmd_rl
from spmd_rl.config.check import check, notes
from spmd_rl.config.config import Config
from spmd_rl.config.data_config import DatasetConfig
from spmd_rl.config.fields import Bounds, knobs, marks
from spmd_rl.config.loading import load_config
from spmd_rl.config.serving import ChatConfig, EvaluateConfig
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.blocks import Experts, LatentAttention
from spmd_rl.models.model_shape import ModelShape

SMOLLM2 = ModelShape(
    architecture="LlamaForCausalLM",
    model_type="llama",
    family="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocabulary=49152,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    rms_epsilon=1e-5,
    rope_theta=1e5,
    rope_scaling=None,
    max_positions=8192,
    eos_token_ids=(2,),
)

# Two groups of four experts, the first of three layers dense, one shared expert.
SPARSE = replace(
    SMOLLM2,
    architecture="DeepseekV3ForCausalLM",
    family="deepseek_v3",
    layers=3,
    heads=8,
    kv_heads=8,
    head_dim=48,
    tied=False,
    experts=Experts(8, 4, 96, 96, False, (False, True, True), "sigmoid", True, True, 2, 2, 2.5),
    mla=LatentAttention(q_rank=32, kv_rank=512, nope_dim=32, rope_dim=16, v_dim=32),
)


@pytest.fixture
def problems(tmp_path):
    def found(arguments, world_size=2, model=SMOLLM2):
        argv = ["--model.path", str(tmp_path), "--run.dir", str(tmp_path / "run"), "--run.tensorboard", "False"]
        return [str(problem) for problem in check(load_config([*argv, *arguments.split()]), world_size, model)]

    return found


def test_the_defaults_have_no_problem(problems):
    assert problems("") == []
    assert problems("", world_size=1, model=None) == []


@pytest.mark.parametrize(
    "arguments, knob, met",
    [
        ("--parallel.tensor 4", "parallel.tensor x parallel.pipeline = 4 x 1", "does not divide the 6 ranks"),
        ("--parallel.pipeline 4", "parallel.tensor x parallel.pipeline = 1 x 4", "can be 1, 2, 3 or 6"),
        (
            "--parallel.context 4",
            "parallel.tensor x parallel.context x parallel.pipeline = 1 x 4 x 1",
            "does not divide the 6 ranks",
        ),
        ("--parallel.context 2", "parallel.context = 2", "the model has 9 attention heads, which its ranks share"),
        ("--parallel.context 0", "parallel.context = 0", "it must be 1 or more"),
        ("--rollout.tensor 4", "rollout.tensor = 4", "does not divide the 6 ranks"),
        ("--parallel.tensor 2", "parallel.tensor = 2", "9 attention heads and 3 key-value heads"),
        ("--rollout.tensor 2", "rollout.tensor = 2", "with this model it can be 1 or 3"),
        (
            "--rollout.refresh_bucket_mib 0.5",
            "rollout.refresh_bucket_mib = 0.5",
            "(a bucket has 1 MiB or more)",
        ),
        ("--rollout.canary_tolerance 0", "rollout.canary_tolerance = 0.0", "set rollout.canary_steps to 0"),
        ("--train.minibatches 5", "train.minibatches = 5", "does not divide train.prompts_per_step = 32"),
        ("--train.prompts_per_step 2", "train.prompts_per_step = 2", "there are 6 inference engines"),
        (
            "--train.prompts_per_step 6 --train.minibatches 6 --algorithm.samples_per_prompt 4",
            "train.prompts_per_step = 6",
            "4 samples for 6 data-parallel ranks",
        ),
        ("--train.tokens_per_microbatch 1000", "train.tokens_per_microbatch = 1000", "has 1536 tokens"),
        ("--algorithm.samples_per_prompt 1", "algorithm.samples_per_prompt = 1", "take 2 or more"),
        (
            "--algorithm.samples_per_prompt 1 --algorithm.advantage rloo",
            "algorithm.samples_per_prompt = 1",
            "(algorithm.advantage = rloo); take 2 or more, or the advantage reinforce_plus_plus or remax",
        ),
        (
            "--algorithm.samples_per_prompt 1 --algorithm.advantage remax --algorithm.curation teaching",
            "algorithm.curation = teaching",
            "a group of one sample (algorithm.samples_per_prompt) is uniform",
        ),
        (
            "--algorithm.samples_per_prompt 1 --algorithm.advantage remax --algorithm.drop_uniform_groups True",
            "algorithm.drop_uniform_groups = True",
            "take 2 or more samples, or train on all",
        ),
        ("--algorithm.kl_in_reward True", "algorithm.kl_in_reward = True", "no reference to diverge from"),
        ("--algorithm.refill_oversample 2", "algorithm.refill_oversample = 2.0", "no further prompts are sampled"),
        ("--algorithm.refill_leftover keep", "algorithm.refill_leftover = keep", "nothing is left over with"),
        ("--algorithm.refill_attempts 2", "algorithm.refill_attempts = 2", "every group is kept, and there is nothing"),
        (
            "--algorithm.loss dual_clip --algorithm.clip_dual 1.2",
            "algorithm.clip_dual = 1.2",
            "not above 1 + algorithm.clip_high = 1.2",
        ),
        ("--train.min_learning_rate 1", "train.min_learning_rate = 1.0", "lower it"),
        ("--train.warmup_steps 101", "train.warmup_steps = 101", "lower it"),
        ("--train.warmup_steps 5 --train.warmup_fraction 0.1", "train.warmup_steps = 5", "leave one of them out"),
        ("--run.profile.ranks 0 9", "run.profile.ranks = 9", "there are 6 ranks; use 0 to 5"),
        ("--run.profile.phases updat", "run.profile.phases = updat", "did you mean update?"),
        ("--train.recompute_layers 2", "train.recompute_layers = 2", "train.recompute = none has no layers to count"),
        (
            "--rollout.max_sequences 128 --rollout.max_batched_tokens 100",
            "rollout.max_batched_tokens = 100",
            "each of the 128 sequences that run at once has a token in a step; 128 or more",
        ),
        (
            "--train.tokens_per_forward_microbatch 4000 --train.tokens_per_microbatch 4096",
            "train.tokens_per_forward_microbatch = 4000",
            "below train.tokens_per_microbatch = 4096",
        ),
        (
            "--rollout.max_response_length 8000 --train.tokens_per_microbatch 10000",
            "data.max_prompt_length + rollout.max_response_length = 1024 + 8000",
            "has 8192 positions",
        ),
        ("--rollout.stop_token_ids 2 49152", "rollout.stop_token_ids = 2 or 49152", "vocabulary of 49152"),
        ("--rollout.cache_gib 0.01", "rollout.cache_gib = 0.01", "one sample of 1536 tokens takes"),
        ("--data.source nowhere.jsonl", "data.source = nowhere.jsonl", "no such file"),
        ("--data.eval_source nowhere.jsonl", "data.eval_source = nowhere.jsonl", "no such file"),
        ("--data.source " + __file__, "data.source = " + __file__, "read from .jsonl, .json, .csv"),
        ("--evaluation.benchmarks nowhere.yaml", "evaluation.benchmarks = nowhere.yaml", "No such file"),
        ("--evaluation.benchmarks nowhere.jsonl", "evaluation.benchmarks = nowhere.jsonl", "no such file"),
        ("--evaluation.samples 4", "evaluation.samples = 4", "set a temperature such as 0.6"),
        ("--evaluation.limit 0", "evaluation.limit = 0", "it must be 1 or more"),
        ("--evaluation.max_response_length 0", "evaluation.max_response_length = 0", "it must be 1 or more"),
        (
            "--evaluation.max_response_length 8000",
            "data.max_prompt_length + evaluation.max_response_length = 1024 + 8000",
            "has 8192 positions",
        ),
        ("--model.reference_path nowhere", "model.reference_path = nowhere", "no such directory"),
        ("--run.dir " + __file__ + "/run", "run.dir = " + __file__ + "/run", "is a file"),
        ("--run.dir None --run.name a/b", "run.name = 'a/b'", "plain name"),
        ("--data.template plain --data.system x", "data.system = 'x'", "set the template to chat"),
        ("--data.arithmetic.wording {a}+{b}", "data.arithmetic.wording = '{a}+{b}'", "{op}"),
        ("--data.arithmetic.wording {a", "data.arithmetic.wording = '{a'", "{op}"),
        ("--data.arithmetic.min_operand 10", "data.arithmetic.max_operand = 9", "raise it"),
        ("--data.arithmetic.operations", "data.arithmetic.operations: it is empty", "name some of"),
        ("--reward.rules", "reward.rules = {}", "every reward would be 0"),
        ("--reward.rules math_answer nan", "reward.rules math_answer = nan", "not a finite number; give one"),
        ("--train.learning_rate inf", "train.learning_rate = inf", "not a finite number"),
        ("--hang.deadline_seconds rollout 0", "hang.deadline_seconds rollout = 0.0", "must be above 0"),
        ("--hang.silent_seconds 1", "hang.silent_seconds = 1.0", "once a second"),
        ("--rollout.temperature 0", "rollout.temperature = 0.0", "must be above 0"),
    ],
)
def test_a_problem_names_the_setting_what_it_met_and_the_way_out(problems, arguments, knob, met):
    found = [problem for problem in problems(arguments, world_size=6) if problem.startswith(knob)]
    assert any(met in problem for problem in found), found


@pytest.mark.parametrize(
    "arguments, knob, met",
    [
        ("--parallel.expert 3", "parallel.expert = 3", "the model has 8 experts; it can be 1, 2, 4 or 8"),
        ("--parallel.expert 4", "parallel.expert x parallel.expert_tensor = 4 x 1", "the 6 ranks of a pipeline stage"),
        ("--parallel.pipeline 2", "parallel.pipeline = 2", "has 3 layers; it can be 1 or 3, or set"),
        ("--parallel.pipeline 2", "parallel.pipeline = 2", "parallel.layers_per_stage to 1 2"),
        ("--parallel.pipeline 6", "parallel.pipeline = 6", "3 layers, fewer than stages"),
        (
            "--parallel.pipeline 2 --parallel.layers_per_stage 2 2",
            "parallel.layers_per_stage = [2, 2]",
            "2 stages with 4 layers; it must name 2 stages with 3 layers together",
        ),
        (
            "--parallel.tensor 2 --parallel.context 3",
            "parallel.context = 3",
            "with parallel.tensor = 2, a rank has 4 attention heads of the model, which its ranks share inside "
            "attention; "
            "it can be 1, 2 or 4",
        ),
        ("--parallel.virtual 3", "parallel.virtual = 3", "there is one pipeline stage"),
        ("--rollout.tensor 2 --rollout.data 2", "rollout.tensor x rollout.data = 2 x 2", "the 6 ranks"),
        ("--rollout.data 3 --rollout.expert_parallel True", "rollout.tensor x rollout.data = 1 x 3", "8 experts"),
        (
            "--parallel.expert_tensor 5",
            "parallel.expert_tensor = 5",
            "an expert of the model has 96 channels",
        ),
        ("--parallel.tensor 2 --parallel.sequence False", "parallel.sequence = False", "set it to true"),
        ("--rollout.cache_gib 0.001", "rollout.cache_gib = 0.001", "one sample of 1536 tokens takes 0.0045 GiB"),
    ],
)
def test_layouts_that_cannot_hold_experts_or_layers_are_refused(problems, arguments, knob, met):
    found = [problem for problem in problems(arguments, 6, SPARSE) if problem.startswith(knob)]
    assert any(met in problem for problem in found), problems(arguments, 6, SPARSE)


def test_layouts_that_can_hold_experts_or_layers_are_not_refused(problems):
    assert problems("--parallel.expert 2 --rollout.data 2 --rollout.expert_parallel True", 2, SPARSE) == []
    assert problems("--parallel.pipeline 2 --parallel.layers_per_stage 1 2 --rollout.data 2", 2, SPARSE) == []
    assert problems("--parallel.tensor 2 --parallel.expert 4 --rollout.tensor 4", 4, SPARSE) == []
    assert problems("--parallel.tensor 2 --parallel.context 4 --parallel.expert 8", 8, SPARSE) == []


def test_a_dense_model_has_no_experts_to_share(problems):
    found = problems("--parallel.expert 2 --parallel.expert_tensor 1 --rollout.data 2 --rollout.expert_parallel True")
    assert [problem.split(" ")[0] for problem in found] == [
        "parallel.expert",
        "rollout.data",
        "rollout.expert_parallel",
    ]


def test_a_model_with_a_score_head_cannot_be_the_policy(problems):
    model = replace(SMOLLM2, architecture="LlamaForSequenceClassification", head="value", labels=1, tied=False)
    (problem,) = problems("", 2, model)
    assert "LlamaForSequenceClassification" in problem and "ForCausalLM" in problem


def test_all_problems_are_found_at_once(problems):
    found = problems(
        "--train.steps 0 --parallel.pipeline 4 --rollout.tensor 2 --rollout.top_p 2 --data.source nowhere.csv"
    )
    assert len(found) == 6, found


def test_every_problem_is_made_with_a_way_out():
    """The third part may be empty where the way out says it: `expected a whole number`."""
    calls = [
        (path.name, node)
        for path in Path(spmd_rl.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem"
    ]
    assert len(calls) > 80
    for name, call in calls:
        ways = [*call.args[3:4], *(word.value for word in call.keywords if word.arg == "way")]
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        assert starred or (ways and ast.unparse(ways[0]) != "''"), f"{name}: {ast.unparse(call)}"


def is_number(kind):
    return kind in (int, float) or any(is_number(inner) for inner in get_args(kind))


@pytest.mark.parametrize("kind", [Config, EvaluateConfig, ChatConfig, DatasetConfig])
def test_every_number_that_can_be_set_has_bounds(kind):
    plain, marked = knobs(kind), knobs(kind, extras=True)
    numbers = [name for name in plain if is_number(plain[name])]
    assert len(numbers) >= 1 and [name for name in numbers if not marks(marked[name], Bounds)] == []


@pytest.mark.parametrize(
    "setting", [name for name, kind in knobs(Config).items() if kind in (int, float) and "NAME" not in name]
)
def test_a_number_far_out_of_its_range_is_refused_without_an_exception(problems, setting):
    if marks(knobs(Config, extras=True)[setting], Bounds) == [Bounds()]:
        assert any(problem.startswith(f"{setting} = nan") for problem in problems(f"--{setting} nan"))
        return
    value = "-7" if knobs(Config)[setting] is int else "-7.5"
    assert any(problem.startswith(f"{setting} = {value}") for problem in problems(f"--{setting} {value}"))


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "remax", "mine.py:f"])
def test_one_sample_a_prompt_is_enough_where_nothing_is_compared_within_a_group(problems, advantage):
    assert problems(f"--algorithm.samples_per_prompt 1 --algorithm.advantage {advantage}") == []


def test_ranks_may_share_key_value_heads(problems):
    model = replace(SMOLLM2, heads=8, kv_heads=2, ffn=1024)
    assert problems("--parallel.tensor 4 --rollout.tensor 4", 4, model) == []
    assert len(problems("--parallel.tensor 3", 3, replace(model, heads=9, ffn=999))) == 1


def test_evaluating_now_and_then_needs_held_out_problems(problems, tmp_path):
    source = tmp_path / "train.jsonl"
    source.write_text("")
    assert problems("--evaluation.every_steps 5") == []
    assert problems(f"--evaluation.every_steps 5 --data.source {source}") == []  # a part of it is held out
    for words in (f"--data.mix {source} 1", f"--data.source {source} --data.eval_problems 0"):
        (problem,) = problems(f"--evaluation.every_steps 5 {words}")
        assert problem.startswith("evaluation.every_steps = 5: there are no held-out problems")


def test_notes_say_what_works_and_is_worth_knowing():
    def said(*arguments):
        return [note.split(" ")[0] for note in notes(load_config(["--model.path", "m", *arguments]), 4)]

    def about(*arguments):
        return said("--train.steps", "20", *arguments)

    assert said() == ["checkpoint.every_steps"]  # 100 steps
    assert said("--checkpoint.every_steps", "10") == said("--train.steps", "20") == []
    assert about("--train.prompts_per_step", "6") == ["train.prompts_per_step"]
    assert about("--algorithm.kl_estimator", "kl", "--algorithm.kl_coefficient", "0.1") == ["algorithm.kl_estimator"]
    for name, value, used in (
        ("gamma", "0.9", ("advantage", "gae")),
        ("value_clip", "0.2", ("advantage", "gae")),
        ("clip_dual", "5", ("loss", "dual_clip")),
        ("clip_dual", "5", ("loss", "mine.py:loss")),
        ("kl_estimator", "k2", ("kl_coefficient", "0.1")),
    ):
        words = (f"--algorithm.{name}", value)
        assert about(*words) == [f"algorithm.{name}"] and about(*words, f"--algorithm.{used[0]}", used[1]) == []
    assert about("--algorithm.loss", "gspo") == ["algorithm.loss_reduction", "algorithm.clip_high"]
    assert about("--algorithm.loss", "rloo", "--algorithm.loss_reduction", "sequence_mean") == []
    assert about("--rollout.top_p", "0.9", "--rollout.top_k", "5") == ["rollout.top_p", "rollout.top_k"]
    assert about("--parallel.pipeline", "4", "--train.prompts_per_step", "4", "--train.minibatches", "4") == [
        "parallel.pipeline"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--checkpoint.resume runs/nowhere", "checkpoint.resume = runs/nowhere: no checkpoint is there"),
        ("--checkpoint.resume_allow train.learning_rat", "did you mean train.learning_rate?"),
        ("--checkpoint.keep_best eval/x/accuracy", "nothing is saved with checkpoint.every_steps = 0"),
        (
            "--checkpoint.load weights",
            "checkpoint.load = weights: nothing says of which checkpoint; name its directory with",
        ),
        (
            "--hang.deadline_seconds rolout 9",
            "there is no such phase or verb; did you mean rollout?",
        ),
        ("--checkpoint.keep_last 0 --checkpoint.every_steps 1", "checkpoint.keep_last = 0: out of range"),
    ],
)
def test_checkpoints_that_could_not_work_are_refused(problems, arguments, words):
    (problem,) = problems(arguments)
    assert words in problem


def test_settings_that_may_differ_are_named_one_by_one_or_by_section(problems):
    assert problems("--checkpoint.resume_allow train.learning_rate rollout. algorithm.clip_ reward reward.rules") == []
    assert problems("--checkpoint.resume_allow reward.rules.math_answer --reward.rules math_answer 1.0") == []


def test_a_config_error_is_a_value_error_that_holds_every_problem():
    one, other = Problem("a.b", 3, "met", "way"), Problem("c", None, "not set", "set it", where="x.yaml")
    assert str(ConfigError(one, other)) == "a.b = 3: met; way\nx.yaml: c: not set; set it"
    assert isinstance(ConfigError(one), ValueError) and ConfigError(one, other).problems == (one, other)
