"""Processes end with the one that started them, also when it is killed."""

import os
import signal
import subprocess
import sys
import time

import psutil

from spmd.ranks import ROOT

# A rank forks a writer, which forks another process; all three would sleep for a minute.
FAMILY = """
import os, time
from spmd_rl.health.parent_death import die_with_all

rank = os.getpid()
writer = os.fork()
if writer == 0:
    die_with_all(rank)
    inner = os.fork()
    if inner == 0:
        os.write(1, b"inner %d\\n" % os.getpid())
    else:
        os.write(1, b"writer %d\\n" % os.getpid())
time.sleep(60)
"""


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_killed_process_has_forked_ends_with_it_to_the_second_generation():
    rank = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    family = [psutil.Process(int(rank.stdout.readline().split()[1])) for _ in range(2)]
    assert all(lives(process) for process in family)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    deadline = time.monotonic() + 10
    while any(lives(process) for process in family):
        assert time.monotonic() < deadline, "a forked process outlived the one that forked it"
        time.sleep(0.01)
