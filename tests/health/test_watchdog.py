"""Laws of the threads that watch: what one rank does when it is asked, and a report that does not succeed at once."""

import json
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch.distributed as dist

from deadlines import slowdown
from spmd_rl.config.config import HangConfig
from spmd_rl.health import watchdog
from spmd_rl.health.hang_detector import DeadlineExceeded
from spmd_rl.health.heartbeat import HeartbeatSource


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start the watch of one rank of two, whose other one is what the test puts in the store."""
    monkeypatch.setattr(watchdog, "PostMortem", lambda dump: SimpleNamespace(stacks=-1, status=-1))
    world_store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    running = []

    def start(rank: int):
        world = SimpleNamespace(rank=rank, size=2, store=world_store)
        running.append(watchdog.Watchdog(HangConfig(action="report"), world, tmp_path))
        return running[0], dist.PrefixStore("hang", world_store)

    yield start
    for one in running:
        one.close()


def wait_for(happened, seconds: float = 20.0):
    deadline = time.monotonic() + seconds * slowdown()
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_rank_of_another_node_writes_its_own_stacks_and_looks_at_nobody_elses_process(started, tmp_path):
    _, store = started(1)
    beat = msgspec.json.encode(HeartbeatSource(0).beat())
    for key, value in (("timeout", ""), ("exit", ""), ("monitor", beat)):
        store.set(key, value)
    examine = [{"by": 0, "beat": json.loads(beat)}]  # by a rank of the silent one's machine
    store.set("request", json.dumps({"id": "first", "directory": str(tmp_path), "examine": examine}))
    wait_for(lambda: store.check(["answer/first/1"]))
    assert json.loads(store.get("answer/first/1")) == {"examined": {}, "wrote": True}
    text = (tmp_path / "rank_00001.txt").read_text()
    assert text.startswith("rank 1 (") and "wait_for" in text
    assert not (tmp_path / "rank_00000.txt").exists()


def test_ranks_that_do_not_answer_are_waited_for_once_and_for_a_fixed_time(started, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(watchdog.Watchdog, "_ask", lambda self, *request: asked.append(request) or {})
    one, _ = started(0)
    one._detector.observe(time.monotonic(), [HeartbeatSource(0).beat(), HeartbeatSource(1).beat()])
    found = time.monotonic()
    one._report(DeadlineExceeded("rank 1 is late", 0.0), found)
    [(_, ranks, until)] = asked
    assert (ranks, until) == ({0, 1}, found + watchdog._ANSWER_SECONDS)


def test_a_report_that_could_not_be_made_is_made_again(started, tmp_path, monkeypatch, capfd):
    tried = []
    make = watchdog.Watchdog._report

    def report(self, exceeded, found):
        tried.append(exceeded.reason)
        if len(tried) == 1:
            raise OSError("no room for it now")
        make(self, exceeded, found)

    monkeypatch.setattr(watchdog.Watchdog, "_report", report)
    one, _ = started(0)
    one._timeout = "rank 0: an exchange timed out"
    wait_for(lambda: list(tmp_path.glob("hang/*/places.json")))
    assert tried == ["rank 0: an exchange timed out"] * 2
    [report_file] = tmp_path.glob("hang/*/report.txt")
    assert "hang: rank 0: an exchange timed out" in report_file.read_text()
    assert "the watch for hangs met an error and goes on: OSError: no room for it now" in capfd.readouterr().err
