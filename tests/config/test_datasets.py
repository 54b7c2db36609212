"""Files that describe a dataset, and what data.* refuses."""

from pathlib import Path

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.data_config import DatasetConfig
from spmd_rl.config.loading import dump, load_config, load_dataset_config
from spmd_rl.errors import ConfigError

ROOT = Path(__file__).parents[2]
DATASETS = sorted((ROOT / "configs" / "datasets").glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def written(text, name="sums.yaml"):
        file = tmp_path / name
        file.write_text(text)
        return str(file)

    return written


def problems(*arguments):
    config = load_config(["--model.path", str(ROOT), *arguments])
    return [str(problem) for problem in check(config, 1, None)]


@pytest.mark.parametrize(
    "source, name",
    [
        ("arithmetic", "arithmetic"),
        ("reasoning_gym:leg_counting", "leg_counting"),
        ("data/train.jsonl", "train"),
        ("data/gsm8k", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
    ],
)
def test_a_bare_source_has_all_defaults(source, name):
    assert load_dataset_config(source) == DatasetConfig(source, name=name)


def test_a_file_describes_a_dataset_and_its_rows_may_be_elsewhere(write):
    file = write("source: a/b\nprompt_column: problem\nextra_columns: [level]\noptions: {size: 3, kind: x}\n")
    dataset = load_dataset_config(file)
    assert (dataset.name, dataset.source, dataset.prompt_column) == ("sums", "a/b", "problem")
    assert (dataset.extra_columns, dataset.options) == (("level",), {"size": 3, "kind": "x"})
    assert load_dataset_config(f"{file}:../data/x.jsonl") == DatasetConfig(
        **vars(dataset) | {"source": "../data/x.jsonl"}
    )
    assert load_dataset_config(write("source: x.csv\nname: mine\n")).name == "mine"
    assert load_dataset_config(write("prompt_column: a\n") + ":x.csv").source == "x.csv"


@pytest.mark.parametrize(
    "text, said",
    [
        ("source: a\npromt_column: b\n", "promt_column: there is no such setting; did you mean prompt_column?"),
        ("source: a\nproblems: many\n", "problems = 'many': expected a whole number"),
        ("source: a\nextra_columns: b\n", "extra_columns = 'b': expected a list"),
        ("prompt_column: b\n", "source: not set; name a file, a directory or a hub dataset"),
        ("- a\n", "expected settings such as `prompt_column: problem`, found list"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_datasets_file_is_named(write, text, said):
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_dataset_config(file)
    assert any(said in str(problem) and file in str(problem) for problem in caught.value.problems)
    (problem,) = problems("--data.source", file)
    assert problem.startswith(f"data.source = {file}: ") and said in problem


@pytest.mark.parametrize("file", DATASETS, ids=lambda file: file.stem)
def test_every_shipped_dataset_loads(file):
    assert load_dataset_config(str(file)).name == file.stem


def test_there_is_a_dataset_for_each_that_the_documentation_names():
    assert {file.stem for file in DATASETS} >= {
        *(
            "deepscaler",
            "deepscaler_r1",
            "dapo_math_17k",
            "gsm8k",
            "math_500",
            "aime_2024",
            "verl_parquet",
            "slime_jsonl",
        )
    }


def test_a_mix_is_set_on_the_command_line_and_in_a_file(tmp_path, write):
    config = load_config(["--model.path", "m", "--data.mix", "a.jsonl", "3", "reasoning_gym:leg_counting", "1"])
    assert config.data.mix == {"a.jsonl": 3.0, "reasoning_gym:leg_counting": 1.0}
    file = tmp_path / "run.yaml"
    file.write_text(dump(config))
    assert load_config(["--config", str(file)]) == config


def test_thinking_is_on_off_or_not_said():
    said = [
        load_config(["--model.path", "m", *arguments]).data.enable_thinking
        for arguments in ([], ["--data.enable_thinking"], ["--data.enable_thinking", "false"])
    ]
    assert said == [None, True, False]


@pytest.mark.parametrize(
    "arguments, starts, ends",
    [
        ("--data.template qwen_r2", "data.template = qwen_r2: there is no such template", "did you mean qwen_r1?"),
        ("--data.template x.jinja", "data.template = x.jinja: there is no such file", ""),
        ("--data.template plain --data.enable_thinking true", "data.enable_thinking = True", "such as qwen3"),
        ("--data.answer_pattern (", "data.answer_pattern = (: not a regular expression", "fix it"),
        ("--data.answer_pattern x", "data.answer_pattern = x: it has no group", "around what is the answer"),
        ("--data.mix arithmetic 0", "data.mix arithmetic = 0.0: out of range", "above 0"),
        ("--data.mix arithmetic nan", "data.mix arithmetic = nan: not a finite number", "give one"),
        ("--data.mix nowhere.csv 1", "data.mix = nowhere.csv: there is no such file", ""),
        ("--data.mix arithmetic 1 --data.source openai/gsm8k", "data.source = openai/gsm8k: data.mix names", ""),
        ("--data.source nowhere.yaml", "data.source = nowhere.yaml: No such file", "name an existing YAML file"),
        ("--data.source a/b/c", "data.source = a/b/c: there is no such file", ""),
        ("--data.source nowhere", "data.source = nowhere: there is no such file", ""),
        ("--data.mix arithmetic 1 --evaluation.every_steps 2", "evaluation.every_steps = 2: there are no", ""),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(arguments, starts, ends):
    (problem,) = problems(*arguments.split())
    assert problem.startswith(starts) and problem.endswith(ends)


def test_the_file_that_a_datasets_file_names_is_looked_for(write):
    file = write("source: nowhere.csv\n")
    assert problems("--data.source", file)[0].startswith(f"data.source = {file}: there is no file nowhere.csv")
    (problem,) = problems("--data.source", write("source: a/b\ntemplate: qwen_r2\n"))
    assert "there is no such template; did you mean qwen_r1?" in problem


@pytest.mark.parametrize("source", ["openai/gsm8k", "reasoning_gym:leg_counting", str(ROOT), "arithmetic"])
def test_sources_that_can_be_read_later_are_no_problem(source):
    assert problems("--data.source", source) == []
    assert problems("--data.source", source, "--data.eval_source", source) == []
