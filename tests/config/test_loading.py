"""YAML and command line to a Config."""

import ast
import inspect
import itertools
import subprocess
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from spmd_rl.config.config import Config, ModelConfig, RunConfig
from spmd_rl.config.fields import knobs
from spmd_rl.config.loading import dump, load_config
from spmd_rl.config.reward_config import RewardModelConfig
from spmd_rl.config.serving import ChatConfig, EvaluateConfig
from spmd_rl.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return ["--config", str(file)]


def problems(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    found = [str(problem) for problem in caught.value.problems]
    assert str(caught.value) == "\n".join(found)
    return found


def test_without_a_file_the_defaults_hold():
    assert load_config(["--model.path", "m"]) == Config(ModelConfig("m"), run=RunConfig(name="grpo"))


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    argv = write(tmp_path, "model: {path: m}\ntrain: {steps: 5, minibatches: 4}\nrun: {seed: 3}\n")
    config = load_config([*argv, "--train.steps", "2", "--run.dir", "out"])
    assert (config.train.steps, config.train.minibatches, config.run.seed, config.run.dir) == (2, 4, 3, "out")


def test_hyphens_and_equal_signs_are_accepted_on_the_command_line():
    config = load_config(["--model.path=m", "--train.prompts-per-step=4", "--data.system=- be brief"])
    assert (config.train.prompts_per_step, config.data.system) == (4, "- be brief")


def test_the_last_of_a_repeated_option_wins():
    assert load_config(["--model.path", "m", "--train.steps", "2", "--train.steps", "3"]).train.steps == 3


def test_booleans_are_read_as_python_and_as_yaml_write_them():
    argv = ["--model.path", "m", "--train.recompute", "--data.shuffle", "false", "--run.tensorboard", "False"]
    config = load_config(argv)
    assert (config.train.recomputes, config.data.shuffle, config.run.tensorboard) == ("full", False, False)


def test_lists_and_rules_replace_the_default_ones():
    config = load_config(
        ["--model.path", "m", "--rollout.stop", "User:", "\n", "--reward.rules", "format", "0.5", "a.py:f", "-1"]
    )
    assert config.rollout.stop == ("User:", "\n")
    assert config.reward.rules == {"format": 0.5, "a.py:f": -1.0}
    assert load_config(["--model.path", "m", "--data.arithmetic.operations", "-", "*"]).data.arithmetic.operations == (
        "-",
        "*",
    )


def test_sections_under_a_users_own_name_come_from_the_file_and_the_command_line(tmp_path):
    text = "model: {path: m}\nreward:\n  models:\n    helpful: {path: a, clip: [-2, 2]}\n    safe: {path: b}\n"
    config = load_config(
        [*write(tmp_path, text), "--reward.models.safe.weight", "0.5", "--reward.models.brief-1.path", "c"]
    )
    assert config.reward.models == {
        "helpful": RewardModelConfig("a", clip=(-2.0, 2.0)),
        "safe": RewardModelConfig("b", weight=0.5),
        "brief_1": RewardModelConfig("c"),
    }
    assert load_config(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    "text, arguments, said",
    [
        ("models: 3", [], "reward.models = 3: expected names"),
        ("models: {a: }", [], "reward.models = {'a': None}: expected names"),
        ("models: {a.b: {path: x}}", [], "expected names (of letters, digits and _), each with settings"),
        ("models: {a: {pth: x}}", [], "reward.models.a.pth: there is no such setting; did you mean"),
        ("models: {a: {weight: x}}", [], "reward.models.a.weight = 'x': expected a number"),
        ("models: ", ["--reward.models.a.wieght", "1"], "did you mean reward.models.NAME.weight?"),
        ("models: ", ["--reward.models.a.dtype", "half"], "reward.models.a.dtype = half: expected one of float32"),
        ("models: ", ["--reward.models.a.b.path", "x"], "reward.models.a.b.path: there is no such setting"),
    ],
)
def test_mistakes_in_sections_under_a_users_own_name_are_named(tmp_path, text, arguments, said):
    (problem,) = problems([*write(tmp_path, f"model: {{path: m}}\nreward: {{{text}}}\n"), *arguments])
    assert said in problem


@pytest.mark.parametrize("text, value", [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1", 1.0), ("'3e-5'", 3e-5)])
def test_a_float_may_be_written_in_every_usual_way(tmp_path, text, value):
    config = load_config(write(tmp_path, f"model: {{path: m}}\ntrain:\n  learning_rate: {text}\n"))
    assert config.train.learning_rate == value
    assert type(config.train.learning_rate) is float


def test_off_is_a_word_and_not_a_boolean(tmp_path):
    assert load_config(write(tmp_path, "model: {path: m}\nrun:\n  wandb: off\n")).run.wandb == "off"


def test_a_section_with_every_line_commented_out_keeps_its_defaults(tmp_path):
    argv = write(tmp_path, "model: {path: m}\ntrain:\n  # steps: 3\n")
    assert load_config(argv) == Config(ModelConfig("m"), run=RunConfig(name="run"))


@pytest.mark.parametrize(
    "words, name",
    [
        ([], "run"),
        (["--algorithm.advantage", "gae"], "run"),
        (["--run.name", "mine"], "mine"),
        (["--run.dir", "elsewhere"], "run"),
    ],
)
def test_a_run_without_a_name_is_called_as_its_file(tmp_path, words, name):
    argv = [*write(tmp_path, "model: {path: m}\n"), *words]
    assert load_config(argv).run.name == name
    assert load_config(argv) == load_config(argv)  # on every rank, at every start


def test_a_run_without_a_name_and_a_file_is_called_as_its_program():
    assert load_config(["--model.path", "m"]).run.name == "grpo"
    assert load_config(["--model.path", "m", "--algorithm.advantage", "gae"]).run.name == "ppo"


def test_an_unknown_key_names_the_file_its_path_and_the_nearest_setting(tmp_path):
    argv = write(tmp_path, "model: {path: m}\ntrain: {stpes: 3}\nlearning_rate: 1\nrollouts: {tensor: 2}\nzzz_qqq: 1\n")
    found = problems([*argv, "--train.minibatch", "2", "--rollout", "3"])
    assert found == [
        f"{argv[1]}: train.stpes: there is no such setting; did you mean train.steps?",
        f"{argv[1]}: learning_rate: there is no such setting; did you mean train.learning_rate?",
        f"{argv[1]}: rollouts: there is no such setting; did you mean rollout?",
        f"{argv[1]}: zzz_qqq: there is no such setting; --help lists all of them",
        "command line: train.minibatch: there is no such setting; did you mean train.minibatches?",
        "command line: rollout: a section; set what is in it, such as rollout.tensor",
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("train: {steps: two}", "train.steps = 'two': expected a whole number"),
        ("train: {steps: 2.0}", "train.steps = 2.0: expected a whole number"),
        ("train: {steps: true}", "train.steps = True: expected a whole number"),
        ("train: {steps: }", "train.steps = None: expected a whole number"),
        ("train: {learning_rate: fast}", "train.learning_rate = 'fast': expected a number"),
        ("data: {shuffle: 1}", "data.shuffle = 1: expected true or false"),
        ("train: {recompute: 1}", "train.recompute = 1: expected one of none, selective, full, True, False"),
        ("run: {wandb: maybe}", "run.wandb = 'maybe': expected one of off, offline, online"),
        ("run: {name: 7}", "run.name = 7: expected text"),
        ("rollout: {stop: x}", "rollout.stop = 'x': expected a list"),
        ("rollout: {stop_token_ids: [1, a]}", "rollout.stop_token_ids = [1, 'a']: expected a list"),
        ("reward: {rules: [math_answer]}", "reward.rules = ['math_answer']: expected names with a number each"),
        ("train: 3", "train = 3: expected a section"),
    ],
)
def test_a_value_of_a_wrong_type_names_the_setting_the_value_and_the_type(tmp_path, text, said):
    (problem,) = problems(write(tmp_path, "model: {path: m}\n" + text))
    assert said in problem


def test_all_problems_of_file_and_command_line_are_reported_at_once(tmp_path):
    argv = write(tmp_path, "train: {steps: two, stpes: 3}\n")
    found = problems([*argv, "--train.minibatches", "x", "--reward.rules", "a", "--data.shuffle", "maybe"])
    assert [problem.split(": ")[1].split(" =")[0] for problem in found[:2]] == ["train.steps", "train.stpes"]
    assert found[2].startswith("model.path: not set")
    assert found[3:] == [
        "command line: train.minibatches = x: expected a whole number",
        "command line: reward.rules = a: expected names with a number each",
        "command line: data.shuffle = maybe: expected true or false",
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("train: {steps: 3", "not valid YAML"),
        ("train: {steps: 3, steps: 4}", "steps is given twice"),
        ("- a\n- b\n", "expected sections"),
    ],
)
def test_a_file_that_is_not_a_configuration_says_why(tmp_path, text, said):
    (problem,) = problems(write(tmp_path, text))
    assert said in problem


def test_a_missing_file_and_a_config_option_without_one_are_reported():
    assert problems(["--config", "nowhere.yaml"])[0].startswith("--config = nowhere.yaml: No such file")
    assert problems(["--config", "--model.path", "m"]) == ["--config: expected one YAML file"]
    assert problems(["run.yaml", "--model.path", "m"]) == [
        "command line: run.yaml: expected --config FILE or --section.setting VALUE"
    ]


def test_what_dump_writes_loads_back_equal(tmp_path):
    words = ["off", "1e-6", "null", "\n", "", "true", "ünï: {x}"]
    config = load_config(
        ["--model.path", "m", "--rollout.stop", *words, "--rollout.stop_token_ids", "1", "2"]
        + ["--data.system", "None of\nthat", "--train.learning_rate", "3e-7", "--reward.rules", "a.py:f", "-0.5"]
    )
    assert load_config(write(tmp_path, dump(config))) == config


def test_help_lists_every_setting_with_its_explanation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 0
    assert [name for name in knobs(Config) if f"--{name} " not in printed] == []
    assert "--config FILE" in printed
    assert "Tensor-parallel size (TP)" in printed


def test_help_shows_the_values_of_the_file_as_defaults(tmp_path, capsys):
    with pytest.raises(SystemExit):
        load_config([*write(tmp_path, "model: {path: somewhere}\ntrain: {steps: 1234}\n"), "--help"])
    assert "1234" in capsys.readouterr().out


def test_every_setting_is_explained():
    sections = [kind for kind in (*sections_of(Config), *sections_of(EvaluateConfig), *sections_of(ChatConfig))]
    explained, fields = set(), set()
    for kind in dict.fromkeys(base for section in sections for base in section.__mro__ if is_dataclass(base)):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for node, after in itertools.pairwise([*body, None]):
            if isinstance(node, ast.AnnAssign) and "default_factory=" not in ast.unparse(node):
                fields.add((kind.__name__, node.target.id))
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    explained.add((kind.__name__, node.target.id))
    assert len(fields) > 120
    assert fields - explained - {("Config", "model")} == set()


def sections_of(kind):
    """Return a class of settings and those of its sections."""
    inner = [found for name, found in get_type_hints(kind).items() if is_dataclass(found)]
    return [kind, *(found for section in inner for found in sections_of(section))]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_configuration_loads(file):
    load_config(["--config", str(file)])


def test_reading_a_configuration_imports_no_torch():
    code = (
        "import sys, spmd_rl.config.check, spmd_rl.models.model_shape; from spmd_rl.config.loading import load_config;"
        "load_config(['--model.path', 'm']);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
