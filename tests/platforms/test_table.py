"""The table of machines, and one that another package brings."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.errors import ConfigError
from spmd_rl.platforms import current, detect, names, record
from spmd_rl.testing.launcher import ROOT
from tests.platforms.installed import installed


def run(words, path):
    """Of a process that has the toy machine: its exit status and what it said."""
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": path}, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_a_machine_of_another_package_is_named_detected_and_refused_like_ours(tmp_path):
    path = os.pathsep.join(filter(None, (*installed(tmp_path), os.environ.get("PYTHONPATH"))))
    ask = """
from spmd_rl.platforms import current, detect, names, record
assert names() == ("cpu", "cuda", "npu", "toy") and detect() == "toy", names()
assert current() is current("auto") is record("toy")
from spmd_rl.config.loading import load_config
assert load_config(["--model.path", "m", "--run.platform", "toy"]).run.platform == "toy"
"""
    assert run(["-c", ask], path) == (0, "")
    status, said = run(["-m", "spmd_rl.grpo", "--help"], path)
    assert status == 0 and "{auto,cpu,cuda,npu,toy}" in said


def test_what_is_not_here_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="run.platform = npu: torch_npu is not installed; .*setup_env.sh npu"):
        current("npu")
    with pytest.raises(ValueError, match="run.platform = tpu: there are auto, cpu, cuda, npu"):
        current("tpu")
    with pytest.raises(ValueError, match="run.platform = cud[\\s\\S]*cuda"):
        load_config(["--model.path", "m", "--run.platform", "cud"])


def test_the_machine_that_was_named_holds_until_another_one_is():
    assert current("cpu") is current() is record("cpu")
    assert detect() in names()


@pytest.mark.parametrize("name", names())
def test_an_engine_in_another_process_is_refused_by_the_variables_name(monkeypatch, name):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING = 1: .*one engine.*unset VLLM_ENABLE_V1"):
        replace(record(name), environment={}, more_environment=dict).set_environment()


@pytest.mark.parametrize("name", names())
def test_every_record_says_where_messages_go_and_how_large_they_are(name):
    machine = record(name)
    assert machine.name == name and machine.patches == name
    assert machine.socket_variables[0] == "GLOO_SOCKET_IFNAME"
    assert 0 < machine.link_probe_bytes <= machine.bucket_bytes
    assert bool(machine.visible_devices_variable) == (machine.device_count is not type(machine).device_count)
