"""A run that is killed goes on as if it had never been, without anybody's hand."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deadlines import crowding
from spmd.ranks import ROOT
from spmd_rl.testing.launcher import environment, torchrun

sys.path.insert(0, str(ROOT / "tools"))
import chaos

# The nightly set kills more often (launch/test.sh).
KILLS = int(os.environ.get("SPMD_RL_KILLS", "3"))
# A kill costs a start, and so it is the deadline's measure.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600 * (KILLS + 2))]

STEPS = 4 * KILLS + 8


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """A run that is killed again and again, in start-ups, steps and saves, and the same run undisturbed."""
    root = tmp_path_factory.mktemp("storm")
    problems = chaos.chaos(root, KILLS, seed=3, ranks=2, steps=STEPS, patience=600, more=[])
    return SimpleNamespace(root=root, killed=root / "killed", undisturbed=root / "undisturbed", problems=problems)


def test_every_kill_is_followed_by_a_restart_and_the_end_is_that_of_the_undisturbed_run(storm):
    assert storm.problems == []


def test_the_log_and_the_metrics_say_what_each_restart_lost(storm):
    said = (storm.killed / "run.log").read_text()
    assert "torchrun has started the ranks again" in said and "lost:" in said
    assert '"restart/count"' in (storm.killed / "metrics.jsonl").read_text()
    assert not list((storm.killed / "checkpoints").glob("*.partial"))
    assert (storm.killed / "checkpoints" / "latest").read_text() == f"step_{STEPS:06d}\n"


def oldest_saved(storm) -> int:
    """A step: of the oldest checkpoint that the undisturbed run has kept."""
    return min(int(path.name[-6:]) for path in (storm.undisturbed / "checkpoints").glob("step_*"))


def again(storm, name, *more) -> tuple[int, str]:
    """The run once more, from the oldest checkpoint of the undisturbed run; status and output."""
    saved = storm.undisturbed / "checkpoints" / f"step_{oldest_saved(storm):06d}"
    arguments = chaos.settings(storm.root, storm.root / name, STEPS, ["--checkpoint.resume", str(saved), *more])
    done = subprocess.run(
        torchrun(2, "-m", "spmd_rl.grpo", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600 * crowding(),
        check=False,
    )
    return done.returncode, done.stdout


def test_a_changed_setting_is_refused_by_name(storm):
    status, output = again(storm, "refused", "--algorithm.clip_low", "0.1")
    assert status != 0
    assert "algorithm.clip_low = 0.1: the run to go on with had 0.2" in output


def test_verify_resume_says_of_a_users_run_that_it_goes_on_exactly(storm):
    settings = chaos.settings(storm.root, storm.root / "mine", 50, [])
    options = ["--dir", str(storm.root / "verify"), "--steps", "4", "--by-hand"]
    done = subprocess.run(
        [sys.executable, "-m", "spmd_rl.verify_resume", *options, *settings],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=600 * crowding(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: weights of 51 parameters, 64 samples, " in done.stdout
    assert done.stdout.rstrip().endswith("of steps 1 to 4: bit-identical")
    assert not (storm.root / "mine").exists()
