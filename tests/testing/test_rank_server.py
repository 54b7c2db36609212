"""Test what the rank server says of jobs that go wrong, and its end that tests see; its ranks are in tests/spmd."""

import subprocess
import sys

import pytest

from spmd import server as servers
from spmd_rl.testing.launcher import ROOT, environment

RAISED = "failed: rank 1 ended with 1"


def served_by(monkeypatch, tmp_path, program: str) -> servers.Server:
    """Return a server that is another program, as the one of this session."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    made = servers.Server.__new__(servers.Server)
    made.jobs, made.directory, made.process = 0, tmp_path, process
    (tmp_path / "said.txt").write_text("the last words")
    monkeypatch.setattr(servers, "Server", lambda module: made)
    servers.the_server.cache_clear()
    assert servers.the_server() is made
    return made


@pytest.fixture(autouse=True)
def another_for_others():
    kept = servers.the_server
    servers.the_server = servers.cache(kept.__wrapped__)
    yield
    servers.the_server = kept


def test_a_server_that_has_ended_is_named_with_its_last_words_and_replaced(monkeypatch, tmp_path):
    made = served_by(monkeypatch, tmp_path, "")
    with pytest.raises(AssertionError, match="forked from has ended:\nthe last words"):
        made.run("nothing", 1, {}, 60)
    assert servers.the_server.cache_info().currsize == 0


def test_a_server_that_nobody_waits_for_any_more_is_ended_and_replaced(monkeypatch, tmp_path):
    """What it answers later would be taken for the answer to the next job."""
    made = served_by(monkeypatch, tmp_path, "import time; time.sleep(1000)")

    class GivesUp:
        def readline(self) -> str:
            raise TimeoutError

    made.process.stdout.close()
    made.process.stdout = GivesUp()
    with pytest.raises(TimeoutError):
        made.run("nothing", 1, {}, 60)
    assert made.process.wait(60) != 0 and servers.the_server.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("pass", ""),
        ("if rank == 1: raise ValueError('on purpose')", RAISED),
        ("if rank == 1: os.kill(os.getpid(), 9)", "failed: rank 1 ended with -9"),
        ("for _ in range(310 * rank): threading.Thread(target=time.sleep, args=(60,)).start()", RAISED),
        ("while rank == 1: time.sleep(0.1)", "did not end within 2 s of a machine of its own, on ranks [0, 1]"),
    ],
    ids=["well", "raises", "killed", "leaves threads", "hangs"],
)
def test_a_job_that_fails_or_hangs_is_told_with_its_ranks(tmp_path, act, problem):
    job = f"import os, threading, time\ndef main():\n    rank = int(os.environ['RANK'])\n    {act}\n"
    (tmp_path / "a_job.py").write_text(job)
    asked = {"module": "a_job", "ranks": 2, "directory": str(tmp_path), "timeout_seconds": 2}
    program = f"import os; from spmd.server import _do; print(_do({asked!r}, os.getppid()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(ROOT / "tests", tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == problem
    assert (tmp_path / "raised1").exists() == (problem == RAISED)
    if problem == RAISED:
        why = "ValueError: on purpose" if "raise" in act else "311 threads: which process groups did not end"
        for file in ("raised1", "said.txt"):
            assert why in (tmp_path / file).read_text()
