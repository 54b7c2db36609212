"""The checks of a new machine run here too, and a report says what each found."""

import subprocess
import sys

import pytest

from spmd_rl.testing.launcher import ROOT
from tools.bringup.__main__ import CHECKS
from tools.bringup.outcome import _failed, attempt, expect, leave


@pytest.mark.long
def test_checks_pass_on_a_cpu_and_stand_in_one_report(tmp_path):
    report = tmp_path / "report.txt"
    command = [
        sys.executable,
        "-m",
        "tools.bringup",
        "--only",
        "integers",
        "fork",
        "attention",
        "--report",
        str(report),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = report.read_text()
    assert said.startswith("cpu, ") and "torch 2" in said.splitlines()[0]
    for name in ("integers", "fork", "attention"):
        assert f"== {name}: pass" in said
    assert "FAIL" not in said


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.parametrize("name", ["seeds", "runs", "repeat"])
def test_checks_that_start_engines_pass_on_a_cpu_too(tmp_path, name):
    command = [sys.executable, "-m", "tools.bringup", "--only", name, "--report", str(tmp_path / "report.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"== {name}: pass" in done.stdout, (tmp_path / "report.txt").read_text()


@pytest.mark.long
def test_what_this_machine_does_not_have_is_said_and_no_failure(tmp_path):
    report, asked = tmp_path / "report.txt", ("sleep", "graphs", "queue")
    command = [sys.executable, "-m", "tools.bringup", "--only", *asked, "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = report.read_text()
    assert done.returncode == 0 and all(f"== {name}: not here" in said for name in asked), said
    assert said.count("not here: ") == len(asked) and "TASK_QUEUE_ENABLE" in said


def test_each_check_is_a_file_and_a_row_of_the_page():
    page = (ROOT / "docs" / "npu_bringup.md").read_text()
    for name in CHECKS:
        assert (ROOT / "tools" / "bringup" / f"{name}.py").is_file() and f"| `{name}` |" in page


def test_what_a_library_raises_is_what_a_check_found(capsys):
    def act():
        raise RuntimeError("no such operator")

    attempt("an operator", act)
    expect("a sum", True)
    assert capsys.readouterr().out == "FAIL an operator: RuntimeError: no such operator\npass a sum\n"
    with pytest.raises(SystemExit) as ended:
        leave()
    assert ended.value.code == 1
    _failed.clear()
