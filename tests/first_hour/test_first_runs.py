"""A new user's first runs, with their ranks: the exit status, the last words on the screen, the directory."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import make_tiny_run, tiny_rule, tiny_settings

from deadlines import crowding
from spmd_rl.runtime.process import INCOMPLETE, USER_ERROR
from spmd_rl.testing.launcher import environment

pytestmark = [pytest.mark.spmd, pytest.mark.slow]
SECONDS = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory in which everything is typed, with a tiny model and a rule."""
    root = tmp_path_factory.mktemp("spmd_rl_home")
    make_tiny_run(root)
    return root


def begin(home: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spmd_rl", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=home, env=environment(), text=True, **streams)


def typed(home: Path, *words: str) -> tuple[int, str]:
    """Type `spmd-rl WORDS`; return the exit status and what is on the screen."""
    process = begin(home, *words)
    screen, _ = process.communicate(timeout=SECONDS * crowding())
    return process.returncode, screen


def train(home: Path, name: str, steps: int = 1, *words: str) -> list[str]:
    own = [*tiny_settings(home, train={"steps": steps}), *tiny_rule(home), "--run.name", name]
    return ["grpo", "--nproc_per_node", "2", *own, *words]


@pytest.fixture(scope="module")
def first(home):
    """Return what the screen of the run `first` said."""
    status, screen = typed(home, *train(home, "first"))
    assert status == 0, screen
    return screen


def steps_of(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "timing/rollout" in row]  # the others are evaluations


def wait_for(run: Path, file: str) -> None:
    deadline = time.monotonic() + SECONDS * crowding()
    while not (run / file).exists():
        assert time.monotonic() < deadline, f"{run / file} does not come"
        time.sleep(0.1)


def test_a_run_ends_with_its_summary_and_is_not_moved_by_the_same_command(home, first):
    assert "runs/first/hf" in first.strip().splitlines()[-1], first
    status, screen = typed(home, *train(home, "first"))
    assert status == USER_ERROR and "it holds a finished run of 1 steps" in screen, screen
    assert (home / "runs/first/hf/config.json").exists() and not (home / "runs/first/earlier").exists()


def test_of_two_runs_in_one_directory_the_second_is_refused_and_the_first_is_whole(home):
    first = begin(home, *train(home, "shared", 4))
    wait_for(home / "runs/shared", "run.lock")
    # It is not over before both refusals were said, however fast the machine is.
    of_first = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for one in of_first:
        one.suspend()
    refusals = [typed(home, *train(home, "shared", 4))]
    # Past the check of the command, as on another machine: the ranks refuse it.
    ranks = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "spmd_rl.grpo",
    ]
    words = train(home, "shared", 4)[3:]
    done = subprocess.run([*ranks, *words], cwd=home, env=environment(), capture_output=True, text=True, check=False)
    for one in of_first:
        one.resume()
    screen, _ = first.communicate(timeout=SECONDS * crowding())
    assert first.returncode == 0, screen
    assert steps_of(home / "runs/shared")[-1] == 4 and not (home / "runs/shared/earlier").exists()
    assert refusals[0][0] == USER_ERROR and "another run is in it: process" in refusals[0][1], refusals
    assert done.returncode != 0 and "another run is in it" in done.stderr


def test_an_interrupt_is_one_line_that_says_how_to_go_on_and_the_same_command_does(home):
    words = train(home, "again", 200, "--checkpoint.every_steps", "1")
    process = begin(home, *words)
    wait_for(home / "runs/again", "checkpoints/step_000002")
    process.send_signal(signal.SIGINT)
    screen, _ = process.communicate(timeout=SECONDS * crowding())
    assert process.returncode == 128 + signal.SIGINT
    last = screen.strip().splitlines()[-1]
    assert last.startswith("ended by SIGINT; the same command resumes from step"), screen
    assert "Traceback" not in screen
    done = steps_of(home / "runs/again")[-1]
    status, screen = typed(home, *train(home, "again", done + 1, "--checkpoint.every_steps", "1"))
    assert status == 0, screen
    assert steps_of(home / "runs/again") == sorted(set(steps_of(home / "runs/again")))


def test_a_checkpoint_that_could_not_be_saved_is_in_the_last_words_and_the_status(home):
    words = ["--checkpoint.every_steps", "1", "--inject", "disk_full:step=1"]
    status, screen = typed(home, *train(home, "full", 2, *words))
    assert status == INCOMPLETE, screen
    assert "after steps 1 is not saved" in screen.strip().splitlines()[-1]


def test_the_error_of_a_rank_is_the_last_thing_on_the_screen_and_in_the_log(home):
    words = ["--inject", "raise:rank=1,phase=update,step=1,error=the weights are gone"]
    status, screen = typed(home, *train(home, "fails", 2, *words))
    assert status == 1, screen
    assert "rank 1 failed (exit status 1): RuntimeError: the weights are gone" in "\n".join(screen.splitlines()[-8:])
    assert "the weights are gone" in (home / "runs/fails/run.log").read_text()


def test_the_trained_model_is_evaluated_and_talked_with_by_the_runs_name(home, first):
    asked = ["--model", "runs/first", "--benchmark", "arithmetic_demo", "--limit", "2", "--rollout.cache_gib", "0.02"]
    lengths = ["--max_prompt_length", "120", "--max_response_length", "8", "--rollout.max_sequences", "8"]
    status, screen = typed(home, "evaluate", *asked, *lengths)
    assert status == 0 and "accuracy" in screen, screen
    chat = [sys.executable, "-m", "spmd_rl", "chat", "--model", "runs/first", "--max_tokens", "4", "--context", "128"]
    talk = {"input": "2 + 2?\nexit\n", "capture_output": True, "text": True, "check": False}
    told = subprocess.run(chat, cwd=home, env=environment(), **talk)
    assert told.returncode == 0, told.stdout + told.stderr
