"""The training half's laws and speed, as they run on a device: with what is there, and without what is not needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from needs import need_programs
from spmd_rl.testing.launcher import environment, torchrun

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = ("vllm", "tyro", "wandb", "math_verify", "reasoning_gym", "plotext", "rich")
"""Packages that an image with torch and transformers lacks, and that only training never asks for."""
PARTS = {"log-probabilities as transformers'": 4, "a shared prompt's gradient": 2, "offload": 1, "speed": 1}
PARTS |= {"waits of a micro-batch, scored and learned": 1, "head": 1, "attention": 0, "experts": 1}


@pytest.mark.spmd
@pytest.mark.slow
def test_it_runs_where_vllm_is_not_installed(tmp_path):
    need_programs("bash")
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    command = ["bash", "launch/test.sh", "device", "--platform", "cpu", "--tokens", "64", "--length", "32"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path, PYTHON=sys.executable), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    *lines, last = ran.stdout.splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert last == "0 do not hold" and all(one["holds"] for one in said)
    assert {name: sum(one["part"] == name for one in said) for name in PARTS} == PARTS


@pytest.mark.spmd
@pytest.mark.slow
def test_what_could_run_beside_an_update_is_a_part_of_it():
    command = torchrun(2, str(ROOT / "tools" / "bench_overlap.py"), "--platform", "cpu", "--turns", "1")
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [one["micro_batches"] for one in said] == [1, 4]
    assert all(seconds > 0 for one in said for seconds in one["seconds"].values())
