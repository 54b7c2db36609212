"""Test what a process says of itself, and what others of its machine can read of it while it cannot speak."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_rl.distributed import status
from spmd_rl.distributed.status import RankStatus, set_status
from spmd_rl.health import procfs
from spmd_rl.health.heartbeat import Heartbeat, HeartbeatSource, PostMortem, waits_in

ROOT = Path(__file__).resolve().parents[2]

OTHER = """
import os, signal, sys, threading, time
from spmd_rl.health.heartbeat import PostMortem, HeartbeatSource
from spmd_rl.distributed.status import set_status
import msgspec
post_mortem = PostMortem(signal.SIGUSR2)
print(msgspec.json.encode(HeartbeatSource(3, post_mortem.stacks, post_mortem.status).beat()).decode(), flush=True)
set_status(step=4, phase="update", doing="micro-batch 2 of 3 \\u00e9")
print("there", flush=True)
def sleeps_here():
    time.sleep(60)
sleeps_here()
"""


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(status, "_status", RankStatus())
    monkeypatch.setattr(status, "_listeners", [])


def test_a_beat_has_the_place_its_seconds_and_the_stack(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pulse = HeartbeatSource(5)
    set_status(step=2, phase="rollout", verb="generate", doing="request 17")
    now = 101.0
    first = pulse.beat()
    now = 101.5
    second = pulse.beat()
    assert (second.rank, second.step, second.phase, second.verb, second.doing) == (
        *(5, 2, "rollout", "generate"),
        "request 17",
    )
    assert second.number == first.number + 1 and second.since == first.since
    assert (first.seconds, second.seconds) == (1.0, 1.5)
    assert (second.process, second.machine) == (os.getpid(), procfs.machine())
    assert any("test_a_beat_has_the_place" in line for line in second.stack)
    set_status()
    assert pulse.beat().since > second.since


@pytest.mark.long
def test_the_call_that_waits_is_known_by_its_line_or_by_torch_s_file():
    class Work:
        def wait(self):
            return sys._getframe(1)

    assert waits_in(Work().wait()) in ("", "wait")  # the file is read on a thread of its own: a disk may hang
    found = Work().wait
    deadline = time.monotonic() + 10
    while waits_in(found()) != "wait" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waits_in(Work().wait()) == "wait"
    plain = sys._getframe()
    assert waits_in(plain) == ""
    code = compile("frame = f()", str(Path("torch") / "distributed" / "distributed_c10d.py"), "exec")
    names = {"f": lambda: sys._getframe(1)}
    exec(code, names)
    assert waits_in(names["frame"]) == "<module>"


def test_others_read_where_a_stopped_process_is_and_its_stacks_once_it_runs():
    import msgspec

    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as other:
        try:
            beat = msgspec.json.decode(other.stdout.readline(), type=Heartbeat)
            assert (beat.step, beat.phase) == (0, "start")
            assert other.stdout.readline() == "there\n"
            while procfs.state(beat.process, beat.begun) != "S":  # on its way to sleep
                time.sleep(0.01)
            os.kill(beat.process, signal.SIGSTOP)
            while procfs.state(beat.process, beat.begun) not in procfs.STOPPED:
                time.sleep(0.01)
            found = PostMortem.status_of(beat)
            assert (found.step, found.phase, found.doing) == (4, "update", "micro-batch 2 of 3 é")
            assert found.rank == 3 and found.stack == [], "its last stack is that of another status"
            os.kill(beat.process, signal.SIGCONT)
            assert "sleeps_here" in PostMortem(signal.SIGUSR2).stacks_of(beat)
            procfs.end_with_descendants(beat.process, beat.begun + 1)
            assert other.poll() is None, "another process of that number is left alone"
            procfs.end_with_descendants(beat.process, beat.begun)
            assert other.wait(10) == -signal.SIGKILL
            assert procfs.state(beat.process, beat.begun) == procfs.GONE
            assert PostMortem.status_of(beat) == beat
        finally:
            other.kill()


def test_a_process_is_ended_with_all_that_it_has_started_also_while_it_is_stopped():
    nested = f"{sys.executable} -c 'import time; time.sleep(60)'"
    with subprocess.Popen(["sh", "-c", f"{nested} & echo $!; {nested}"], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGSTOP)
        assert child in procfs.descendants(os.getpid())
        procfs.end_with_descendants(parent.pid, procfs.begun(parent.pid))
        assert parent.wait(10) == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while procfs.state(child, 0) != procfs.GONE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert procfs.state(child, 0) == procfs.GONE
