"""Test what torchrun reads of a rank that has ended: all of it or nothing, however the rank ended."""

import json
import os
import signal
import subprocess
import sys

from spmd_rl.health.error_file import ERROR_FILE, ErrorFileHandler

ENDS = """
import sys
from pathlib import Path
from spmd_rl.health.error_file import ErrorFileHandler

write = Path.write_text
def interrupted(self, text, **options):
    with open(self, "w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
Path.write_text = interrupted
try:
    raise ValueError("why")
except ValueError as error:
    ErrorFileHandler().record_exception(error)
"""


def test_an_error_is_there_with_its_stack(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    for text in ("long " * 999, "short"):
        try:
            raise ValueError(text)
        except ValueError as error:
            ErrorFileHandler().record_exception(error)
        said = json.loads((tmp_path / "error.json").read_text())["message"]
        assert said["message"] == f"ValueError: {text}" and "test_error_file.py" in said["extraInfo"]["py_callstack"]
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_rank_that_is_killed_while_it_writes_leaves_no_half_file(tmp_path):
    file = tmp_path / "error.json"
    ended = subprocess.run([sys.executable, "-c", ENDS], env=os.environ | {ERROR_FILE: str(file)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not file.exists() and list(tmp_path.iterdir()), "what it had begun has another name"


def test_without_torchrun_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    ErrorFileHandler().record_exception(ValueError("why"))
    assert not list(tmp_path.iterdir())
