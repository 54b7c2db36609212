"""Faults in real runs: each is detected, said in words, and what follows is exact."""

import importlib.util

import pytest

from spmd.ranks import ROOT
from spmd_rl.analysis.compare_runs import first_difference
from spmd_rl.config.fault_spec import read_fault

spec = importlib.util.spec_from_file_location("fault_matrix", ROOT / "tools" / "fault_matrix.py")
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)

HERE = ("restarts", "learning")
"""The groups that the suite runs; `python tools/fault_matrix.py` runs all."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    matrix.make_tiny_run(root)
    return root


@pytest.fixture(scope="module")
def undisturbed(root):
    calm = matrix.undisturbed(root)
    assert calm.status == 0, "\n".join(calm.output[-60:])
    return calm.directory


@pytest.fixture(scope="module", params=HERE)
def suffered(request, root):
    return matrix.GROUPS[request.param], matrix.suffer(root, request.param)


def test_every_fault_strikes_once_and_what_detects_it_says_so(suffered, capsys):
    group, outcome = suffered
    for case, seen in zip(group.cases, outcome.seen, strict=True):
        fault = read_fault(case.fault)
        words = f"in {fault.phase} of step {fault.step}" if fault.phase else f"of step {fault.step}"
        assert words in seen.struck and f"rank {fault.rank} " in seen.struck, (case.fault, *outcome.output[-60:])
        assert bool(seen.message) == bool(case.message), (case.fault, *outcome.output[-60:])
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
    assert first_difference(undisturbed, outcome.directory) is None
    assert (outcome.directory / "checkpoints" / "latest").read_text() == "step_000006\n"
    saved = sorted(path.name for path in (outcome.directory / "checkpoints").iterdir())
    assert saved == ["latest", "step_000002", "step_000006"]  # the disk was full at step 4
