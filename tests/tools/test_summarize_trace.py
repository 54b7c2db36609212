"""Traces of verbs: which are written, and what is said of them."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.distributed.status import set_status
from spmd_rl.platforms import record
from spmd_rl.worker.profiler import Profiler

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("summarize_trace", ROOT / "tools" / "summarize_trace.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

MS = 1000


def event(name, kind, start, length, thread=1):
    return {"ph": "X", "cat": kind, "name": name, "ts": start * MS, "dur": length * MS, "pid": 1, "tid": thread}


# In 100 ms the host spends 60 in a linear layer, 40 of these in its product; the device works for 30, twice at once.
EVENTS = [
    event("aten::linear", "cpu_op", 0, 60),
    event("aten::mm", "cpu_op", 10, 40),
    event("gemm", "kernel", 50, 20, 7),
    event("gemm", "kernel", 60, 20, 8),
    event("marker", "other", 0, 100),
    {"ph": "i", "name": "an instant", "ts": 1},
]


@pytest.fixture
def traced(tmp_path):
    (tmp_path / "profile").mkdir()
    with gzip.open(tmp_path / "profile" / "step.json.gz", "wt") as file:
        json.dump({"traceEvents": EVENTS}, file)
    return tmp_path


def test_a_trace_is_summed_up_by_what_took_time_itself(traced, capsys):
    assert tool.main([str(traced)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step.json.gz: 0.100 s, host in operators 60%, device 30%" in said
    assert "gemm 0.0400 40.0% 2" in said
    assert said.index("aten::mm 0.0400 40.0% 1") < said.index("aten::linear 0.0200 20.0% 1")


def test_a_run_without_traces_says_how_to_get_them(tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 2
    assert "profile steps with --run.profile.steps 2" in capsys.readouterr().err


def profiler(tmp_path, *words, rank=0):
    config = load_config(["--model.path", "m", *words])
    return Profiler(config.run.profile, tmp_path, rank, record("cpu"))


def test_only_the_steps_ranks_and_phases_that_were_asked_for_are_profiled(tmp_path):
    some = profiler(tmp_path, "--run.profile.steps", "2", "5", "--run.profile.phases", "update")
    assert some.wants(2, "update") and some.wants(5, "update")
    assert not some.wants(3, "update") and not some.wants(2, "rollout")
    assert not profiler(tmp_path, "--run.profile.steps", "2", rank=1).wants(2, "update")
    assert not profiler(tmp_path).wants(1, "update")


def test_a_verb_leaves_a_trace_that_the_tool_reads(tmp_path, capsys):
    import torch

    one = profiler(tmp_path, "--run.profile.steps", "3")
    try:
        set_status(step=3, phase="update")
        for _ in range(2):
            with one.verb("learn"):
                torch.ones(64, 64) @ torch.ones(64, 64)
        set_status(step=4, phase="update")
        with one.verb("learn"):
            torch.ones(2)
    finally:
        set_status(step=0, phase="start")
    names = [file.name for file in sorted((tmp_path / "profile").iterdir())]
    assert names == [f"step_000003_update_learn_{n}_rank_00000.json.gz" for n in (1, 2)]
    assert tool.main([str(tmp_path), "--top", "3"]) == 0
    assert "aten::mm" in capsys.readouterr().out
