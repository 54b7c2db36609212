"""See how ranks end, as who started them sees it: spmd_rl.runtime.torchrun over ranks that only start and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadlines import crowding
from spmd_rl.errors import ConfigError
from spmd_rl.runtime import torchrun
from spmd_rl.runtime.process import INCOMPLETE, USER_ERROR
from spmd_rl.runtime.torchrun import check, meeting, saying_so

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, time
from spmd_rl.runtime import process
from spmd_rl.runtime.process import launch

process.OTHERS_WAIT_SECONDS = 100  # a machine that is busy starts them far apart

def configure(arguments):
    if how == "refuses":
        raise ValueError("train.steps = 0: out of range")

def live(settings, started):
    if how == "fails" and os.environ["RANK"] == "1":
        raise RuntimeError("the weights are gone")
    if how == "lacks" and os.environ["RANK"] == "0":
        return "step 4 is not saved"
    if how != "lacks":
        print("lives", flush=True)
        time.sleep(600)

how = sys.argv[1]
launch(configure, live, last_words=lambda: "; the same command resumes from step 3")
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    script = tmp_path_factory.mktemp("spmd_rl_ranks") / "rank.py"
    script.write_text(RANK)
    return script


def start(*words, ranks=2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spmd_rl.runtime.torchrun", "--standalone", "--nproc_per_node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, *map(str, words)], text=True, env=environment, cwd=ROOT, **streams)


def end(*words, **more) -> tuple[int, str]:
    process = start(*words, **more)
    output, _ = process.communicate(timeout=120 * crowding())
    return process.returncode, output


@pytest.mark.spmd
def test_a_refusal_is_one_screen_and_torchrun_adds_nothing(rank):
    status, said = end(rank, "refuses")
    assert status == USER_ERROR
    assert said.strip() == "spmd_rl cannot start:\ntrain.steps = 0: out of range"


@pytest.mark.spmd
def test_the_error_of_a_rank_is_the_last_thing_that_is_said(rank):
    status, said = end(rank, "fails")
    assert status == 1 and "SignalException" not in said and "ChildFailedError" not in said
    *_, error, frame = said.strip().splitlines()
    assert error == "rank 1 failed (exit status 1): RuntimeError: the weights are gone"
    assert frame == f"  rank.py:{RANK[: RANK.index('raise RuntimeError')].count(chr(10)) + 1} in live"


@pytest.mark.spmd
def test_what_a_run_did_not_do_is_said_and_is_its_exit_status(rank):
    status, said = end(rank, "lacks")
    assert (status, said.strip()) == (INCOMPLETE, f"step 4 is not saved (exit status {INCOMPLETE})")


@pytest.mark.spmd
def test_an_interrupt_is_one_line_that_says_how_to_go_on(rank):
    process = start(rank, "lives")
    assert process.stdout is not None and process.stdout.readline() == "lives\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60 * crowding())
    assert process.returncode == 128 + signal.SIGINT
    assert output.replace("lives", "").strip() == "ended by SIGINT; the same command resumes from step 3"


@pytest.mark.spmd
def test_ranks_end_with_a_launcher_that_is_killed_and_say_how_to_go_on(rank):
    process = start(rank, "lives")
    assert process.stdout is not None and process.stdout.readline() == "lives\n"
    time.sleep(0.2)
    process.kill()
    output = process.stdout.read()  # up to the end of the last rank
    process.wait()
    assert output.replace("lives", "").strip() == "ended by SIGTERM; the same command resumes from step 3"


@pytest.mark.long
@pytest.mark.parametrize("how", [("--nproc_per_node", "3"), ("--standalone", "--nproc-per-node=3"), ("--nnodes=3",)])
def test_settings_are_checked_for_the_ranks_that_there_will_be_before_any_starts(tiny_models, how, capsys):
    words = [
        "--model.path",
        tiny_models["llama"],
        "--data.max_prompt_length",
        "120",
        "--rollout.max_response_length",
        "8",
    ]
    with pytest.raises(ConfigError, match=r"parallel.tensor x parallel.pipeline = 2 x 1: does not divide the 3 ranks"):
        check([*how, "-m", "spmd_rl.grpo", *words, "--parallel.tensor", "2"])
    assert "WORLD_SIZE" not in os.environ
    check([*how, "-m", "spmd_rl.grpo", *words])
    assert capsys.readouterr().out == "spmd_rl.grpo: the settings are right; starting 3 ranks\n"


@pytest.mark.parametrize(
    "words", [("script.py", "--parallel.tensor", "2"), ("--nproc_per_node=gpu", "-m", "spmd_rl.grpo")]
)
def test_what_only_the_ranks_can_check_is_left_to_them(words):
    check(words)


def test_two_runs_of_a_machine_meet_in_different_places_unless_somebody_says_where(monkeypatch):
    run = ["--nproc_per_node", "2", "-m", "spmd_rl.grpo", "--train.steps", "2"]
    assert meeting(run) == ["--standalone", "--local_addr", "localhost", *run]
    for told in (["--master-port=29501"], ["--nnodes", "2", "--rdzv_endpoint", "node0:29500"]):
        assert meeting([*told, *run]) == [*told, *run]
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "node0:29500")
    assert meeting(run) == run


@pytest.mark.parametrize("there", ["word", "variable"])
def test_the_ranks_of_one_machine_meet_by_no_name_of_it(monkeypatch, there):
    alone = ["--standalone"] * (there == "word") + ["--nproc_per_node", "2", "-m", "spmd_rl.grpo"]
    if there == "variable":
        monkeypatch.setenv("PET_STANDALONE", "1")
    assert meeting(alone) == ["--local_addr", "localhost", *alone]
    assert meeting(["--local-addr=10.0.0.1", *alone]) == ["--local-addr=10.0.0.1", *alone]
    monkeypatch.setenv("PET_LOCAL_ADDR", "10.0.0.1")
    assert meeting(alone) == alone


def test_a_node_that_waits_long_for_the_others_to_end_says_so(monkeypatch, capsys):
    agent = SimpleNamespace(_exit_barrier_timeout=300)
    saying_so(lambda agent: None)(agent)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torchrun, "QUIET_SECONDS", 0.0)
    said = []

    def until_it_is_said(agent):
        while not "".join(said).endswith("\n"):
            said.append(capsys.readouterr().err)

    saying_so(until_it_is_said)(agent)
    words = "launch: the ranks of this node have ended well; waiting for the other nodes, for up to 300 s\n"
    assert "".join(said) == words


@pytest.mark.spmd
def test_a_refusal_and_help_end_a_launch_before_any_rank_starts(tiny_models):
    status, said = end("-m", "spmd_rl.grpo", "--model.path", tiny_models["llama"], "--train.steps", "0")
    assert status == USER_ERROR and "spmd_rl cannot start:" in said and "train.steps = 0" in said
    assert "settings are right" not in said and "Traceback" not in said
    status, said = end("-m", "spmd_rl.grpo", "--help")
    assert status == 0 and "--train.steps" in said and "settings are right" not in said


@pytest.mark.spmd
def test_an_interrupt_while_the_settings_are_checked_is_one_line(rank, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    process = start(rank, "lives")
    while b"torch" not in Path(f"/proc/{process.pid}/maps").read_bytes():  # it imports torch, and has no ranks
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60 * crowding())
    assert process.returncode == 128 + signal.SIGINT
    assert output.strip() == "ended by SIGINT before the ranks started"
