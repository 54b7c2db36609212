"""Settings and files of other programs: what their users are told."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.config.config import Config
from spmd_rl.config.fields import knobs
from spmd_rl.config.foreign.foreign_row import Facts
from spmd_rl.config.foreign.lookup import PROGRAMS, foreign_answer
from spmd_rl.config.foreign.translation import read_foreign, text, translate
from spmd_rl.config.loading import load, load_config
from spmd_rl.config.serving import EvaluateConfig
from spmd_rl.errors import ConfigError
from spmd_rl.plan.__main__ import configure

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "config" / "foreign").glob("*.yaml"))
ANSWERS = (Path(__file__).parent / "foreign" / "answers.txt").read_text().splitlines()
ROWS = [(program, row) for program in PROGRAMS for row in program.rows]


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        load_config(["--model.path", "m", *words])
    (problem,) = caught.value.problems
    return str(problem)


def test_every_name_leads_to_settings_that_there_are_or_says_what_to_do():
    known = knobs(Config)
    assert [row.name for _, row in ROWS if not set(row.ours) <= known.keys()] == []
    assert [row.name for _, row in ROWS if not row.ours and not row.note] == []
    for program in PROGRAMS:
        names = [row.name for row in program.rows]
        assert sorted(set(names)) == sorted(names)


def test_every_name_value_and_answer_is_written_out():
    lines = {tuple(line.split(" | ")[:2]) for line in ANSWERS}
    assert lines == {(program.option, row.name) for program, row in ROWS if row.ours}


@pytest.mark.parametrize("line", ANSWERS, ids=lambda line: " ".join(line.split(" | ")[:2]))
def test_a_name_with_a_value_gets_its_answer(line):
    import yaml

    option, name, value, expected = line.split(" | ")
    program = next(one for one in PROGRAMS if one.option == option)
    facts = Facts(
        {
            "global_batch_size": 64,
            "train_batch_size": 64,
            "rollout_batch_size": 64,
            "train_iters": 200,
            "total_training_steps": 200,
        }
        | {"max_steps": 200, "max_prompt_length": 1024, "max_tokens": 2048, "max_response_length": 2048}
        | {"num_generations": 8, "ranks": 4, "gradient_accumulation_steps": 4, "use_kl_in_reward": True}
        | {"tensor_model_parallel_size": 4, "moe_tp_extend_ep": True}
    )
    row = program.row(name)
    assert row is not None and row.name == name
    found = row.settings(yaml.safe_load(value), facts)
    assert (", ".join(f"{ours} = {one}" for ours, one in found.items()) or f"? {' '.join(row.ours)}") == expected


@pytest.mark.parametrize(
    "words, answer",
    [
        (
            "--clip_ratio 0.3",
            "MindSpeed-RL's clip_ratio is here algorithm.clip_low = 0.3 and algorithm.clip_high = 0.3",
        ),
        ("--rl_config.init_kl_coef 0.01", "init_kl_coef is here algorithm.kl_coefficient = 0.01"),
        ("--mini_batch_size 32", "mini_batch_size is here train.minibatches (prompts of an optimizer step there;"),
        ("--num_generations 4", "TRL's num_generations is here algorithm.samples_per_prompt = 4"),
        ("--actor_rollout_ref.rollout.n 5", "verl's rollout.n is here algorithm.samples_per_prompt = 5"),
        ("--train.lr 1.0e-6", "lr is here train.learning_rate = 1e-06"),
        ("--kl_penalty low_var_kl", "kl_penalty is here algorithm.kl_estimator = k3"),
        ("--seq_length 512", "seq_length is here data.max_prompt_length = 512"),
        ("--stage ray_grpo", "stage has no counterpart here: the module that is started says it"),
        ("--zmq_communication true", "zmq_communication has no counterpart here: rank 0 plans one exchange"),
        ("--gpu_memory_utilization 0.6", "gpu_memory_utilization is here rollout.memory_fraction = 0.6"),
        ("--prompt_type qwen_r1", "prompt_type is here data.template = qwen_r1"),
        ("--tp 4", "tp: there is no such setting; write parallel.tensor"),
        ("--train.batch_size 8", "write train.prompts_per_step"),
        ("--train.steps 3 data.train_batch_size=64", "verl's train_batch_size is here train.prompts_per_step = 64"),
    ],
)
def test_a_foreign_name_is_answered_and_no_neighbour_is_guessed(words, answer):
    said = refused(*words.split())
    assert answer in said and "did you mean" not in said


def test_hydras_form_is_refused_once_and_each_word_is_answered():
    with pytest.raises(ConfigError) as caught:
        load_config(["data.train_batch_size=64", "+actor_rollout_ref.rollout.n=8", "--model.path", "m"])
    form, *answers = map(str, caught.value.problems)
    assert "expected --config FILE or --section.setting VALUE" in form
    assert [answer.partition(" is here ")[2] for answer in answers] == [
        "train.prompts_per_step = 64",
        "algorithm.samples_per_prompt = 8",
    ]


def test_a_file_of_a_launcher_says_what_starts_the_ranks(tmp_path):
    (tmp_path / "a.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n")
    with pytest.raises(ConfigError, match="it is a file of accelerate, which has no part here; torchrun starts"):
        load_config(["--config", str(tmp_path / "a.yaml")])


def test_a_word_that_we_have_too_is_ours():
    assert foreign_answer("temperature", 1.0, knobs(Config)) is None
    assert "did you mean rollout.temperature?" in refused("--temperature", "0.5")


def test_another_program_of_ours_says_the_name_that_it_has():
    with pytest.raises(ConfigError, match="max_completion_length is here max_response_length = 64"):
        load(EvaluateConfig, ["--model", "m", "--max_completion_length", "64"], {"model": ""}, "")
    with pytest.raises(ConfigError, match="there is no such setting; --help lists all of them"):
        load(EvaluateConfig, ["--model", "m", "--init_kl_coef", "1"], {"model": ""}, "")


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_of_another_program_is_recognised_and_the_command_translates_it(file, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(file), "--train.steps", "2"])
    (problem,) = caught.value.problems
    assert f"it is a file of MindSpeed-RL; translate it: python -m spmd_rl from-mindspeed {file}" in str(problem)
    output = tmp_path / "ours.yaml"
    command = [sys.executable, ROOT / "tools" / "from_mindspeed.py", file, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    load_config(["--config", str(output)])


def test_values_change_as_their_meaning_does():
    program, given = read_foreign(next(file for file in FILES if "671b" in file.name))
    done = translate(program, given)
    assert done.values["parallel.expert"] == 64 and done.values["parallel.expert_tensor"] == 1
    assert done.values["rollout.data"] == 64 and done.values["rollout.expert_parallel"] is True
    assert done.values["parallel.layers_per_stage"] == [9, 10, 10, 10, 11, 11]
    assert (done.values["train.minibatches"], done.values["train.tokens_per_microbatch"]) == (1, 4096)
    assert (done.values["train.recompute"], done.values["train.recompute_layers"]) == ("full", 9)
    assert (done.values["rollout.top_k"], done.ranks) == (0, 384)
    written = text(done, Path("r1.yaml"))
    assert "  kl_estimator: k1  # rl_config.kl_penalty: kl" in written
    assert "#   megatron_training.swap_optimizer: true: the optimizer's state, its float32 weights" in written
    assert "no_shared_storage: true: checkpoint.shared: false where nodes share no disk; else leave it out" in written
    assert "not known" not in written.replace("dataset_additional_keys: [labels]: not known", "")


def test_what_their_program_does_unasked_is_written_down():
    program = PROGRAMS[0]
    done = translate(program, {"rl_config.clip_ratio": 0.2})
    assert (done.values["algorithm.kl_coefficient"], done.values["reward.rules"]) == (0.01, {"base_acc": 1.0})
    assert done.comments["algorithm.kl_coefficient"] == "MindSpeed-RL's default"


def test_verl_and_trl_files_are_translated(tmp_path):
    verl = tmp_path / "verl.yaml"
    verl.write_text(
        "data: {train_files: [a.parquet], train_batch_size: 256, max_prompt_length: 512, max_response_length: 1024}\n"
        "actor_rollout_ref:\n  model: {path: m}\n  rollout: {n: 5, tensor_model_parallel_size: 2}\n"
        "  actor: {ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 4, use_kl_loss: true, kl_loss_coef: 1e-3,\n"
        "          kl_loss_type: low_var_kl, optim: {lr: 1e-6}, loss_agg_mode: seq-mean-token-mean}\n"
        "trainer: {n_gpus_per_node: 8, nnodes: 2, save_freq: -1, logger: [console, wandb]}\n"
    )
    trl = tmp_path / "trl.yaml"
    trl.write_text(
        "model_name_or_path: m\nnum_generations: 8\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n"
        "max_completion_length: 256\nmax_steps: 50\nwarmup_ratio: 0.1\nbeta: 0.04\nloss_type: dr_grpo\nuse_vllm: true\n"
    )
    program, given = read_foreign(verl)
    values = translate(program, given).values
    assert translate(program, given).ranks == 16
    assert (values["train.minibatches"], values["train.tokens_per_microbatch"]) == (4, 4 * 1536)
    assert (values["algorithm.kl_coefficient"], values["algorithm.kl_estimator"]) == (0.001, "k3")
    assert (values["algorithm.samples_per_prompt"], values["rollout.tensor"]) == (5, 2)
    assert (values["checkpoint.every_steps"], values["run.wandb"], values["run.tensorboard"]) == (0, "online", False)
    program, given = read_foreign(trl)
    values = translate(program, given, ranks=4).values
    assert (values["train.prompts_per_step"], values["train.warmup_fraction"]) == (8, 0.1)
    assert values["algorithm.loss_reduction"] == "fixed_length"


STUMBLES = {
    "a mini-batch larger than the batch is one step": (
        "data: {train_batch_size: 32}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 64}, rollout: {n: 8}}",
        {"train.minibatches": 1, "train.prompts_per_step": 32},
    ),
    "verl without an estimator is PPO, with one sample a prompt": (
        "actor_rollout_ref: {actor: {ppo_epochs: 1}}\ncritic: {optim: {lr: 1e-5}}\ntrainer: {nnodes: 1}",
        {"algorithm.advantage": "gae", "algorithm.samples_per_prompt": 1, "critic.learning_rate": 1e-5},
    ),
    "verl's files have a critic's section, and GRPO none": (
        "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 5}}\ncritic: {model: {path: x}}",
        {"critic.path": None, "algorithm.advantage": "grpo"},
    ),
    "-1 and null stand for nothing": (
        "actor_rollout_ref: {actor: {optim: {total_training_steps: -1, lr_warmup_steps: -1}}}\n"
        "trainer: {save_freq: -1}",
        {"train.steps": None, "train.warmup_steps": None, "checkpoint.every_steps": 0},
    ),
    "??? stands for nothing, a reference for what it refers to": (
        'actor_rollout_ref:\n  model:\n    path: ???\n  rollout: {n: "${data.many}", tensor_model_parallel_size: '
        '"${oc.select:a.b,4}"}\ndata: {many: 6}',
        {"model.path": None, "algorithm.samples_per_prompt": 6, "rollout.tensor": 4},
    ),
    "a text with references is left out": (
        'trainer: {default_local_dir: "checkpoints/${trainer.name}"}\nactor_rollout_ref: {rollout: {n: 2}}',
        {"run.dir": None},
    ),
    "only a shell knows ~": (
        "actor_rollout_ref: {model: {path: ~/models/x}}",
        {"model.path": str(Path("~/models/x").expanduser())},
    ),
    "1e-6 is a text for YAML": ("megatron_training: {lr: 1e-6}", {"train.learning_rate": 1e-6}),
    "TRL's defaults are Hugging Face's": (
        "num_generations: 4\nuse_vllm: true",
        {"train.schedule": "linear", "train.adam_beta2": 0.999, "rollout.max_response_length": 256},
    ),
    "a batch of TRL's in samples is one prompt at least, where the ranks are known": (
        "num_generations: 8\nper_device_train_batch_size: 1\nuse_vllm: true",
        {"train.prompts_per_step": None},
    ),
    "pictures have a budget of their own, and the pair none": (
        "rl_config: {max_packing_token_size: [15000, 4000], use_dynamic_bsz: true}\n"
        "actor_config: {micro_batch_size: 1}",
        {"train.tokens_per_microbatch": None},
    ),
    "a part of a run stays one, whatever its length": (
        "num_generations: 4\nuse_vllm: true\nmax_steps: -1\nwarmup_ratio: 0.1",
        {"train.warmup_fraction": 0.1, "train.steps": None},
    ),
    "steps of a warm-up come before its part of the run": (
        "num_generations: 4\nuse_vllm: true\nwarmup_steps: 20\nwarmup_ratio: 0.1",
        {"train.warmup_steps": 20, "train.warmup_fraction": None},
    ),
    "verl's rule is a file and a name, and its loggers are several": (
        "custom_reward_function: {path: mine.py, name: judge}\ntrainer: {logger: [console, swanlab]}",
        {"reward.rules": {"verl:mine.py:judge": 1.0}, "run.swanlab": "online", "run.wandb": "off"},
    ),
    "a file for the preparation of data says nothing of training": (
        "handler_name: R1AlpacaStyleInstructionHandler\ninput: a.json\nprompt_type: empty\n"
        "tokenizer_name_or_path: ./Qwen2.5-7B\nmap_keys: {prompt: problem, response: answer}\nseq_length: 2048",
        {"data.template": "empty", "data.prompt_column": "problem", "algorithm.kl_coefficient": None},
    ),
    "EasyR1 has verl's sections and other words": (
        "data: {rollout_batch_size: 512}\nworker: {actor: {global_batch_size: 128}}\ntrainer: {nnodes: 1}\n"
        "algorithm: {adv_estimator: grpo, kl_coef: 1.0e-2}",
        {"train.prompts_per_step": 512, "train.minibatches": 4, "algorithm.kl_coefficient": 0.01},
    ),
    "MindSpeed-RL's shape of a model is in config.json": ("megatron_training: {num_layers: 28}", {}),
}


@pytest.mark.parametrize("what", STUMBLES)
def test_where_people_stumble_who_bring_a_file(what, tmp_path):
    content, expected = STUMBLES[what]
    (tmp_path / "theirs.yaml").write_text(content)
    done = translate(*read_foreign(tmp_path / "theirs.yaml"))
    assert {name: done.values.get(name) for name in expected} == expected
    assert "${" not in str(done.values) and (expected or done.left)
    (tmp_path / "ours.yaml").write_text(text(done, tmp_path / "theirs.yaml"))
    load_config(["--config", str(tmp_path / "ours.yaml"), "--model.path", "m"])


def test_a_file_of_nobody_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="it is not clear whose file it is; say so: --from mindspeed"):
        read_foreign(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("option", "given", "setting", "expected"),
    [
        (
            "verl",
            {"actor.kl_loss_coef": 0.001},
            "algorithm.kl_coefficient",
            0.0,
        ),  # verl's use_kl_loss is off by default
        ("verl", {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.001}, "algorithm.kl_coefficient", 0.001),
        ("mindspeed", {"actor_config.moe_aux_loss_coeff": 0.01}, "train.moe_aux_loss_coefficient", 0.01),
        (
            "mindspeed",
            {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"},
            "train.moe_aux_loss_coefficient",
            0.0,
        ),
        (
            "mindspeed",
            {"recompute_granularity": "selective", "recompute_activation_function": True},
            "train.recompute_modules",
            ["core_attn", "mlp", "moe"],
        ),
        (
            "mindspeed",
            {"recompute_granularity": "full", "recompute_activation_function": True},
            "train.recompute",
            "full",
        ),
        ("mindspeed", {"use_swanlab": True}, "run.swanlab", "online"),
        ("trl", {"max_steps": 300}, "train.steps", 300),
        ("trl", {"max_steps": 300, "num_iterations": 2}, "train.steps", 150),
        (
            "trl",
            {"max_steps": 320, "num_iterations": 2, "steps_per_generation": 16, "gradient_accumulation_steps": 4},
            "train.steps",
            40,
        ),
    ],
)
def test_what_a_value_means_depends_on_what_else_a_file_sets(option, given, setting, expected):
    program = next(one for one in PROGRAMS if one.option == option)
    assert translate(program, given).values[setting] == expected


NOTHING = dict.fromkeys(("device", "device_gib", "prompt_tokens", "response_tokens"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_translated_file_is_planned_as_it_is_with_nothing_downloaded(file, tmp_path):
    program, given = read_foreign(file)
    done = translate(program, given)
    output = tmp_path / "ours.yaml"
    output.write_text(text(done, file))
    options = SimpleNamespace(world_size=done.ranks, rank=None, ranks_per_node=16, **NOTHING)
    case, aside = configure(options, ["--config", str(output)])
    assert aside == [] and case.world_size == done.ranks
    assert Path(case.config.model.path).parent.name == "models"
