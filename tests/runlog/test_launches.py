"""Test what a run says of its launch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.runlog.launches import this_launch

STARTS = (
    ("torchrun", "--nproc_per_node", "2", "-m", "spmd_rl.grpo"),
    ("spmd-rl", "grpo", "--nproc_per_node", "2", "--run.name", "a b"),
    ("-m", "spmd_rl", "grpo", "--nproc_per_node", "2"),
)


@pytest.mark.parametrize("words", STARTS)
def test_the_command_of_a_launch_is_the_one_that_was_typed_and_not_a_ranks(tmp_path, monkeypatch, words):
    """The command line of the process that starts ranks: where a file has the program's name, Python runs that."""
    waits = "import sys; print('here', flush=True); sys.stdin.read()"
    file = tmp_path / "bin" / words[0]
    if words[0] != "-m":
        file.parent.mkdir()
        file.write_text(waits)
        command = [sys.executable, str(file), *words[1:]]
    else:
        Path(tmp_path, "spmd_rl.py").write_text(waits)
        command = [sys.executable, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, **pipes) as starter:
        assert starter.stdout.readline() == b"here\n"
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setattr(os, "getppid", lambda: starter.pid)
        told = this_launch(2, 0).command
        starter.stdin.close()
    typed = " ".join(f"'{word}'" if " " in word else word for word in words)
    assert told == (f"{Path(sys.executable).name} {typed}" if words[0] == "-m" else typed)
