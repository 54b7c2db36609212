"""A run that is killed goes on as if it had never been, without anybody's hand."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spmd.ranks import ROOT
from spmd_rl.controller.same_run import rows

sys.path.insert(0, str(ROOT / "tools"))
import chaos

# launch/test.sh kills a few times; the CI more often, as .ci/run says.
KILLS = int(os.environ.get("SPMD_RL_KILLS", "3"))
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


def again(storm, name, *more) -> subprocess.CompletedProcess:
    """The run once more, from the undisturbed run's last checkpoint but one."""
    saved = sorted((storm.undisturbed / "checkpoints").glob("step_*"))[-2]
    arguments = chaos.settings(
        storm.root / "model", storm.root / name, STEPS, ["--checkpoint.resume", str(saved), *more]
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "spmd_rl.grpo", *arguments], cwd=ROOT, env=environment, timeout=600, capture_output=True, text=True
    )


def test_a_changed_setting_is_refused_by_name(storm):
    refused = again(storm, "refused", "--algorithm.clip_low", "0.1")
    assert refused.returncode != 0
    assert "algorithm.clip_low = 0.1: the run to go on with had 0.2" in refused.stderr


def test_another_layout_takes_up_a_checkpoint(storm):
    other = again(storm, "other", "--parallel.tensor", "2")
    assert other.returncode == 0, other.stderr[-4000:]
    here, there = (
        {row["step"]: row for row in rows(run_dir) if "actor/entropy" in row}
        for run_dir in (storm.undisturbed, storm.root / "other")
    )
    first = min(there)
    assert set(there) == set(range(first, STEPS + 1)) and first > STEPS - 5
    # The first step after it samples from the same weights: the same, but for rounding.
    assert there[first]["actor/entropy"] == pytest.approx(here[first]["actor/entropy"], rel=1e-4)


def test_verify_resume_says_of_a_users_run_that_it_goes_on_exactly(storm):
    settings = chaos.settings(storm.root / "model", storm.root / "mine", 50, [])
    options = ["--dir", str(storm.root / "verify"), "--steps", "4", "--by-hand"]
    done = subprocess.run(
        [sys.executable, "-m", "spmd_rl.verify_resume", *options, *settings],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: weights of 51 parameters, 64 samples, " in done.stdout
    assert done.stdout.rstrip().endswith("of steps 1 to 4: bit-identical")
    assert not (storm.root / "mine").exists()
