"""Tools that start runs start the program that a configuration is for."""

import pytest

from spmd_rl import verify_resume
from tools import bench_algorithms, bench_step

PROGRAMS = {"ppo_demo_smollm2_cpu": "spmd_rl.ppo", "dapo_demo_smollm2_cpu": "spmd_rl.grpo"}


@pytest.fixture
def started(monkeypatch):
    """Have tools note what they would start."""
    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command))
    return commands


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bench_starts_the_program_of_its_configuration(started, tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text("")
    config = f"configs/{name}.yaml"
    assert bench_step.run(config, 2, 3, ["--model.path", "m"], tmp_path) == []
    assert bench_algorithms.train(config, 7, 2, tmp_path, ["--model.path", "m"]) == []
    assert len(started) == 2
    for command in started:
        assert command[command.index("-m", 2) + 1] == PROGRAMS[name]
        assert command[command.index("--config") + 1] == config and "--model.path" in command


@pytest.mark.parametrize(("advantage", "program"), [("gae", "spmd_rl.ppo"), ("rloo", "spmd_rl.grpo")])
def test_verify_resume_starts_the_program_of_its_configuration(monkeypatch, tmp_path, advantage, program):
    monkeypatch.setattr(verify_resume, "LaunchedRun", lambda *arguments: arguments)
    monkeypatch.setattr(verify_resume, "_check", lambda *_: None)
    words = ["--model.path", "m", "--algorithm.advantage", advantage, "--dir", str(tmp_path / "new"), "--ranks", "1"]
    plan = verify_resume._plan(*verify_resume._parse(words))
    assert verify_resume._launched(plan, plan.config, plan.directory / "killed", "once", 0)[-1] == program
