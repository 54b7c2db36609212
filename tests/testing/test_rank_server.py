"""Test the end of the rank server that tests see; its ranks are seen in tests/spmd."""

import subprocess
import sys

import pytest

from spmd import server as servers


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
