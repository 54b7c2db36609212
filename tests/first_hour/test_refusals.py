"""What a new user types wrong in the first hour: each is refused on one screen, with the way out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.__main__ import main
from spmd_rl.config.config import Config, ModelConfig, RunConfig, TrainConfig
from spmd_rl.config.loading import dump
from spmd_rl.errors import ConfigError
from spmd_rl.runlog import run_lock
from spmd_rl.runlog.run_lock import RunLock
from spmd_rl.runtime.startup import configure
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

SCREEN_LINES, SCREEN_COLUMNS = 24, 100
SIZES = ["--data.max_prompt_length", "120", "--rollout.max_response_length", "8", "--rollout.cache_gib", "0.05"]


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_models):
    """A working directory with a model, problems, a rule, and no account anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    Path("model").symlink_to(tiny_models["llama"])
    rows = [{"question": f"{a} + 1?", "answer": str(a + 1)} for a in range(40)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rules.py").write_text("def judge(sample):\n    return 1.0\n")
    return tmp_path


@pytest.fixture
def typed(here, monkeypatch, capfd):
    """Type `spmd-rl WORDS` in a process of its own; return its exit status and what is on the screen."""

    def type_in(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["spmd-rl", *words])
        process = os.fork()
        if process == 0:
            status = 99
            try:
                main()
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(process, 0)
        out, err = capfd.readouterr()
        return os.waitstatus_to_exitcode(status), out + err

    return type_in


RUN = ["--model.path", "model", "--data.source", "problems.jsonl", "--data.prompt_column", "question", *SIZES]


def refused(said: tuple[int, str], *expected: str) -> None:
    """Check that a run was refused on one screen with all of these."""
    status, screen = said
    rows = sum(max(1, -(-len(line) // SCREEN_COLUMNS)) for line in screen.splitlines())
    assert status == 2 and rows <= SCREEN_LINES, screen
    assert "Traceback" not in screen and all(text in screen for text in expected), screen


TYPED = {
    "no model": (["--data.source", "problems.jsonl"], "model.path: not set; name a Hugging Face model directory"),
    "a setting misspelt": (["--trian.steps", "3"], "trian.steps: there is no such setting; did you mean train.steps?"),
    "a setting without its section": (["--learning_rate", "1e-6"], "train.learning_rate"),
    "another program's setting": (["--actor_rollout_ref.actor.optim.lr", "1e-6"], "train.learning_rate"),
    "TRL's settings": (["--num_generations", "8"], "TRL's num_generations is here algorithm.samples_per_prompt = 8"),
    "a group of one": (["--algorithm.samples_per_prompt", "1"], "take 2 or more"),
    "a setting without its dashes": (
        ["--run.name", "mine", "train.steps=3"],
        "write --train.steps=3: a setting has",
    ),
    "a file without --config": (["--run.name", "mine", "demo.yaml"], "write --config demo.yaml"),
    "a directory below ~": (["--model.path", "~/model"], "only a shell knows ~: write /"),
    "verl's file": (["--data.source", "verl.jsonl"], "data.source = verl_parquet:verl.jsonl reads verl's"),
    "a file of solutions": (["--data.source", "sol.jsonl"], "it has messages, solution; name one of these"),
    "a word for a number": (["--train.steps", "many"], "train.steps = many: expected a whole number"),
    "a number out of range": (["--train.steps", "0"], "train.steps = 0"),
    "a model that is not there": (["--model.path", "modle"], "model.path = modle: there is no such directory"),
    "a directory without a model": (["--model.path", "empty"], "model.path = empty: there is no config.json in it"),
    "a model of another kind": (["--model.path", "bert"], "the architecture in its config.json is BertForMaskedLM"),
    "heads without a kernel": (
        ["--model.path", "heads"],
        "heads have 16 values, and vLLM on a CPU computes",
    ),
    "a hub name without a network": (["--model.path", "some/model"], "hf download some/model --local-dir DIR"),
    "a file that is not there": (
        ["--data.source", "problem.jsonl"],
        "data.source = problem.jsonl: there is no",
    ),
    "a file of another kind": (["--data.source", "notes.txt"], "prompts are read from"),
    "an empty file": (["--data.source", "none.jsonl"], "none.jsonl: there is no row in it"),
    "a broken line": (["--data.source", "broken.jsonl"], "broken.jsonl"),
    "another column": (["--data.prompt_column", "prompt"], "it has question, answer"),
    "another answer's column": (["--data.answer_column", "solution"], "it has question, answer"),
    "a rule misspelt": (["--reward.rules", "math_anser", "1"], "there are math_answer, format, exact"),
    "a rule's file misspelt": (["--reward.rules", "rule.py:judge", "1"], "rule.py: there is no such file"),
    "a rule's function misspelt": (
        ["--reward.rules", "rules.py:juge", "1"],
        "it has no function 'juge' (it has: judge)",
    ),
    "a rule without a weight": (["--reward.rules", "math_answer", "0"], "every reward would be 0"),
    "W&B without a key": (["--run.wandb", "online"], "`wandb login`"),
    "a machine that is not here": (["--run.platform", "npu"], "torch_npu is not installed"),
    "ranks that do not divide": (["--parallel.tensor", "4"], "does not divide the 2 ranks"),
    "a sample longer than the model": (["--data.max_prompt_length", "900"], "the model has 512 positions"),
    "a batch that does not divide": (["--train.minibatches", "3"], "does not divide train.prompts_per_step"),
    "a run directory that is a file": (["--run.dir", "rules.py"], "run.dir = rules.py: rules.py is a file"),
    "a checkpoint that is not there": (["--checkpoint.resume", "runs/x"], "no checkpoint is there"),
    "an evaluation of nothing": (
        ["--evaluation.every_steps", "2", "--data.eval_problems", "0"],
        "no held-out problems",
    ),
    "the other program's algorithm": (["--algorithm.advantage", "gae"], "start spmd_rl.ppo"),
    "a configuration that is not there": (["--config", "mine.yaml"], "mine.yaml"),
    "a configuration that is no YAML": (["--config", "rules.py"], "rules.py"),
    "verl's configuration": (["--config", "verl.yaml"], "spmd_rl from-mindspeed verl.yaml --output mine.yaml"),
}


@pytest.fixture
def wrong(here, monkeypatch):
    """Hold what the refused runs name."""
    Path("empty").mkdir()
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    Path("notes.txt").write_text("1 + 1?\n")
    Path("none.jsonl").write_text("")
    Path("broken.jsonl").write_text('{"question": "1?", "answer": "1"\n')
    verl = {"data_source": "x", "prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}
    Path("verl.jsonl").write_text(json.dumps(verl) + "\n")
    Path("sol.jsonl").write_text('{"messages": [{"role": "user", "content": "1?"}], "solution": "1"}\n')
    Path("verl.yaml").write_text("actor_rollout_ref:\n  model:\n    path: x\ntrainer:\n  total_epochs: 1\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("mistake", TYPED)
def test_a_mistake_is_refused_on_one_screen_with_the_way_out(wrong, typed, mistake):
    words, expected = TYPED[mistake]
    if mistake == "heads without a kernel":
        make_tokenizer(make_tiny("heads", "llama", hidden=64, heads=4))
    run = [] if mistake == "no model" else RUN
    refused(typed("grpo", "--nproc_per_node", "2", *run, *words), expected)


def test_five_mistakes_are_one_screen(wrong, typed):
    words = ["--model.path", "modle", "--data.prompt_column", "prompt", "--reward.rules", "rules.py:juge", "1"]
    said = typed("grpo", "--nproc_per_node", "2", *RUN, *words, "--run.wandb", "online", "--parallel.tensor", "4")
    refused(said, "model.path = modle", "data.prompt_column", "'juge'", "run.wandb = online", "parallel.tensor")


def test_a_full_disk_is_refused(typed, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    refused(typed("grpo", "--nproc_per_node", "2", *RUN), "its disk has 0.00 GiB free", "remove old runs")


def test_a_finished_run_is_not_moved_and_the_words_that_begin_anew_are_said(typed):
    directory = Path("runs/grpo")
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump(Config(ModelConfig("m"), train=TrainConfig(3), run=RunConfig("g"))))
    (directory / "metrics.jsonl").write_text('{"step": 3}\n')
    (directory / "hf").mkdir()
    ways = "give this one a run.name or run.dir of its own", "checkpoint.resume = never"
    refused(typed("grpo", "--nproc_per_node", "2", *RUN), "it holds a finished run of 3 steps", *ways)
    assert sorted(os.listdir(directory)) == ["config.yaml", "hf", "metrics.jsonl"]


def test_a_directory_in_use_is_refused_with_who_is_in_it(typed, monkeypatch):
    monkeypatch.setattr(run_lock, "HERE_SECONDS", 0.1)
    lock = RunLock(Path("runs/grpo"), print)
    said = typed("grpo", "--nproc_per_node", "2", *RUN)
    lock.release()
    refused(said, f"another run is in it: process {os.getpid()} on {os.uname().nodename}, since")


def test_an_option_of_torchrun_behind_the_module_is_said_to_be_torchruns(here):
    with pytest.raises(ConfigError, match="--nproc_per_node = 2: it is an option of torchrun; write it before -m"):
        configure([*RUN, "--nproc_per_node", "2"])


def test_a_program_misspelt_is_refused_with_the_nearest(typed):
    refused(typed("gropo"), "did you mean grpo?")


def test_the_help_is_found_by_the_fields_words(typed):
    status, screen = typed("grpo", "--nproc_per_node", "2", "--help")
    assert status == 0
    assert all(word in screen for word in ("(TP)", "(PP)", "(EP)", "KL", "beta", "math_answer", "gsm8k"))


def test_no_word_at_all_says_what_there_is(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spmd-rl"])
    main()
    screen = capsys.readouterr().out
    assert all(name in screen for name in ("grpo", "evaluate", "chat", "plot", "doctor", "gsm8k"))
    assert all(len(line) <= SCREEN_COLUMNS for line in screen.splitlines())


@pytest.mark.parametrize("words", [("spmd_rl.grpo",), ("spmd_rl", "grpo", "--nproc_per_node", "2"), ("spmd_rl.chat",)])
def test_the_help_says_what_was_typed_and_its_head_fits_the_screen(here, words):
    asked = [sys.executable, "-m", *words, "--help"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False)
    usage, *lines = done.stdout.splitlines()
    typed = " ".join(words).removesuffix(" --nproc_per_node 2")
    assert done.returncode == 0 and usage == f"usage: python -m {typed} [-h] [OPTIONS]", done.stderr
    assert all(len(line) <= SCREEN_COLUMNS for line in lines), max(lines, key=len)


def test_a_help_of_which_somebody_reads_the_first_line_ends_well(here):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "spmd_rl.grpo", "--help"], env=env, **pipes) as asked:
        assert asked.stdout.readline().startswith(b"usage")
        asked.stdout.close()
        assert asked.stderr.read() == b"" and asked.wait() == 0
