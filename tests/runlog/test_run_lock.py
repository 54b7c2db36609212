"""A run's directory is one run's: whoever comes second is told who was there, and whoever is gone is no hindrance."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from spmd_rl.runlog import run_lock
from spmd_rl.runlog.run_lock import LOCK, RunLock

HOLD = """
import sys, time
from pathlib import Path
from spmd_rl.runlog.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), print, 0.1)
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


@contextmanager
def held(directory):
    """Have another process hold a directory; ends it by force."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(run_lock, "HERE_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "ELSEWHERE_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.05)


@contextmanager
def taken(directory, lost=print):
    lock = RunLock(directory, lost, 0.1)
    yield lock
    lock.release()


def test_a_second_run_is_told_who_is_there_and_a_third_may_come_when_that_one_has_ended(tmp_path):
    with held(tmp_path) as other:
        with pytest.raises(ValueError) as refused:
            RunLock(tmp_path, print)
        said = str(refused.value)
        assert f"run.dir = {tmp_path}: another run is in it: process {other.pid} on {os.uname().nodename}, " in said
        assert "give this one a run.name or run.dir of its own" in said
        other.communicate("\n")
        assert other.returncode == 0 and not (tmp_path / LOCK).exists()
        with taken(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_killed_run_holds_nothing_and_a_stopped_one_does(tmp_path):
    with held(tmp_path) as other:
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(ValueError, match="another run is in it"):
            RunLock(tmp_path, print)
        other.kill()
        other.wait()
        assert (tmp_path / LOCK).exists()
        with taken(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def elsewhere(directory, **changes):
    """Have a run of another machine hold a directory; its locks are not seen here."""
    holder = {"machine": "node1 pid:[1] b007", "process": 7, "began": 1, "host": "node1", "since": "12:00", "beat": 0}
    (directory / LOCK).write_text(json.dumps(holder | changes))


def test_a_run_of_another_machine_is_there_as_long_as_it_beats(tmp_path, monkeypatch):
    elsewhere(tmp_path, beat=123456789)
    waits = []
    with monkeypatch.context() as clock:
        clock.setattr(run_lock, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
        lock = RunLock(tmp_path, print, 0.1)
        assert sum(waits) > run_lock.ELSEWHERE_SECONDS, "it was watched"
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
        lock.release()
    elsewhere(tmp_path)
    beat = (
        "import json, sys, time\n"
        "holder = json.load(open(sys.argv[1]))\n"
        "while True:\n"
        "    holder['beat'] += 1\n"
        "    open(sys.argv[1], 'r+').write(json.dumps(holder))\n"
        "    print('beats', flush=True)\n"
        "    time.sleep(0.2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", beat, str(tmp_path / LOCK)], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            with pytest.raises(ValueError, match="another run is in it: process 7 on node1, since 12:00"):
                RunLock(tmp_path, print)
        finally:
            process.kill()


def test_a_run_that_was_taken_for_dead_hears_of_it(tmp_path):
    heard = []
    with taken(tmp_path, heard.append):
        elsewhere(tmp_path)
        deadline = time.monotonic() + 5
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(heard) == 1 and "another run has taken this run's directory" in heard[0]


@pytest.mark.parametrize("content", ["", "half a li", '{"machine": "x"}', "[]"])
def test_what_no_run_has_written_holds_nothing(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with taken(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_the_beat_goes_on_where_a_child_was_forked_and_ended(tmp_path):
    with taken(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        first = json.loads((tmp_path / LOCK).read_text())["beat"]
        time.sleep(0.5)
        assert json.loads((tmp_path / LOCK).read_text())["beat"] > first
