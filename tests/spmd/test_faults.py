"""Faults in real runs: each is detected, said in words, and what follows is exact."""

import importlib.util
import signal
import subprocess

import psutil
import pytest

from spmd.ranks import ROOT, run_program
from spmd_rl.analysis.compare_runs import first_difference, rows
from spmd_rl.config.fault_spec import read_fault
from spmd_rl.testing.launcher import environment

pytestmark = pytest.mark.engine

spec = importlib.util.spec_from_file_location("fault_matrix", ROOT / "tools" / "fault_matrix.py")
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)

HERE = ("restarts", "learning")
"""The groups of the main set; the others are slow."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    matrix.make_tiny_run(root)
    return root


@pytest.fixture(scope="module")
def undisturbed(root):
    command = matrix.command(root, root / "undisturbed", 0)
    run_program("spmd_rl.grpo", 2, *command[command.index("spmd_rl.grpo") + 1 :])
    return root / "undisturbed"


GROUPS = [pytest.param(name, marks=() if name in HERE else pytest.mark.slow) for name in matrix.GROUPS]


@pytest.fixture(scope="module", params=GROUPS)
def suffered(request, root):
    return matrix.GROUPS[request.param], matrix.suffer(root, request.param)


def test_every_fault_strikes_once_and_what_detects_it_says_so(suffered, capsys):
    group, outcome = suffered
    for case, seen in zip(group.cases, outcome.seen, strict=True):
        fault = read_fault(case.fault)
        words = f"in {fault.phase} of step {fault.step}" if fault.phase else f"of step {fault.step}"
        said = "\n".join((case.fault, *outcome.output[-60:]))
        assert words in seen.struck and f"rank {fault.rank} " in seen.struck, said
        assert bool(seen.message) == bool(case.message), said
    with capsys.disabled():  # how long it took is told, not judged
        print("\n" + matrix.table([matrix.row(*both, "") for both in zip(group.cases, outcome.seen, strict=True)]))
    assert sum(line.startswith("inject: rank") for line in outcome.output) == len(group.cases)


def test_the_run_goes_on_or_stops_as_it_should(suffered):
    group, outcome = suffered
    stops = any(case.then == matrix.STOPPED for case in group.cases)
    assert (outcome.status != 0) == stops, "\n".join(outcome.output[-60:])
    restarts = sum(case.then == matrix.RESTARTED for case in group.cases)
    assert sum(line.startswith("run grpo: ") for line in outcome.output) == 1 + restarts


def test_what_follows_is_what_an_undisturbed_run_does(suffered, undisturbed):
    group, outcome = suffered
    if not group.exact:
        pytest.skip("its faults change what is learned")
    if any("verb=checkpoint_digests" in case.fault for case in group.cases):
        completed = "step_000006: all its files were written when the run ended"
        assert any(line.endswith(completed) for line in outcome.output), "by the start after the last kill"
    assert first_difference(undisturbed, outcome.directory) is None
    assert (outcome.directory / "checkpoints" / "latest").read_text() == "step_000006\n"
    saved = sorted(path.name for path in (outcome.directory / "checkpoints").iterdir())
    if any(case.fault.startswith("disk_full") for case in group.cases):
        assert saved == ["latest", "step_000002", "step_000006"]  # the disk was full at step 4
    said = (outcome.directory / "run.log").read_text()
    assert "torchrun has started the ranks again" in said and "lost:" in said
    assert '"restart/count"' in (outcome.directory / "metrics.jsonl").read_text()


def test_another_layout_takes_up_a_checkpoint_and_a_rank_that_is_asked_to_end_saves_first(root, undisturbed):
    saved, slow = undisturbed / "checkpoints" / "step_000002", "slow:rank=0,phase=rollout,step=4,seconds=5"
    more = ("--checkpoint.resume", str(saved), "--parallel.tensor", "2", "--inject", slow)
    command = matrix.command(root, root / "other", 0, 2, *more)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    output, asked = [], False
    with subprocess.Popen(command, cwd=ROOT, env=environment(COLUMNS="400"), **options) as run:
        for line in run.stdout:
            output.append(line)
            if line.startswith("step 3/6") and not asked:
                asked = True
                ranks = [one for one in psutil.Process(run.pid).children() if "spmd_rl.grpo" in one.cmdline()]
                ranks[1].send_signal(signal.SIGUSR1)
    assert run.returncode == 0, "".join(output[-60:])
    here, there = (
        {row["step"]: row for row in rows(directory) if "actor/entropy" in row}
        for directory in (undisturbed, root / "other")
    )
    last = max(there)  # asked after a step was told: before it is saved, or in the next one, which is slow
    assert set(there) == set(range(3, last + 1)) and last <= 4
    assert f"asked to end by SIGUSR1: step {last} is saved; the same command goes on from there" in "".join(output)
    assert (root / "other" / "checkpoints" / "latest").read_text() == f"step_{last:06d}\n"
    # The first step samples from the same weights: the same, but for rounding.
    assert there[3]["actor/entropy"] == pytest.approx(here[3]["actor/entropy"], rel=1e-4)
