"""A run that is killed goes on as if it had never been, without anybody's hand."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from spmd.ranks import ROOT
from spmd_rl.analysis.compare_runs import rows

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


def oldest_saved(storm) -> int:
    """A step: of the oldest checkpoint that the undisturbed run has kept."""
    return min(int(path.name[-6:]) for path in (storm.undisturbed / "checkpoints").glob("step_*"))


def again(storm, name, *more, ask_after: str = "") -> tuple[int, str]:
    """The run once more, from the oldest checkpoint of the undisturbed run; status and output.

    `ask_after`: the beginning of a line, after which a rank is asked to save and end.
    """
    saved = storm.undisturbed / "checkpoints" / f"step_{oldest_saved(storm):06d}"
    arguments = chaos.settings(storm.root, storm.root / name, STEPS, ["--checkpoint.resume", str(saved), *more])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*command, "spmd_rl.grpo", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    for line in run.stdout:
        said.append(line)
        if ask_after and line.startswith(ask_after):
            ask_after = ""
            ranks = [one for one in psutil.Process(run.pid).children() if "spmd_rl.grpo" in one.cmdline()]
            ranks[1].send_signal(signal.SIGUSR1)
    return run.wait(timeout=600), "".join(said)


def test_a_changed_setting_is_refused_by_name(storm):
    status, output = again(storm, "refused", "--algorithm.clip_low", "0.1")
    assert status != 0
    assert "algorithm.clip_low = 0.1: the run to go on with had 0.2" in output


def test_another_layout_takes_up_a_checkpoint_and_a_rank_that_is_asked_to_end_saves_first(storm):
    here = {row["step"]: row for row in rows(storm.undisturbed) if "actor/entropy" in row}
    first = oldest_saved(storm) + 1
    step_line, slow = f"step {first:{len(str(STEPS))}}/{STEPS}", f"slow:rank=0,phase=rollout,step={first + 1},seconds=5"
    status, output = again(storm, "other", "--parallel.tensor", "2", "--inject", slow, ask_after=step_line)
    assert status == 0, output[-4000:]
    there = {row["step"]: row for row in rows(storm.root / "other") if "actor/entropy" in row}
    last = max(there)  # asked after a step was told: before it is saved, or in the next one, which is slow
    assert set(there) == set(range(first, last + 1)) and last <= first + 1
    assert f"asked to end by SIGUSR1: step {last} is saved; the same command goes on from there" in output
    assert (storm.root / "other" / "checkpoints" / "latest").read_text() == f"step_{last:06d}\n"
    # The first step samples from the same weights: the same, but for rounding.
    assert there[first]["actor/entropy"] == pytest.approx(here[first]["actor/entropy"], rel=1e-4)


def test_verify_resume_says_of_a_users_run_that_it_goes_on_exactly(storm):
    settings = chaos.settings(storm.root, storm.root / "mine", 50, [])
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
