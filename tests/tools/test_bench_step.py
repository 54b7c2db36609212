import sys

import pytest

from tools import bench_step

PPO = {"old_log_p": 1.0, "critic_model": 1.0, "update_critic": 3.0, "update": 3.0, "adv": 0.5, "rollout": 90.0}
GRPO = {"old_log_p": 1.0, "update": 4.0, "rollout": 80.0}


def rows(phases, peak, all_of_it=100.0):
    row = {f"timing/{phase}": took for phase, took in phases.items()}
    row |= {"timing/all": all_of_it, "memory/peak_bytes": peak}
    return [row | {"timing/update": 1000.0, "memory/peak_bytes": peak * 2}, row, row]


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return a function that runs the tool with runs that only say what they took."""
    made = []

    def run(config, ranks, steps, overrides, directory):
        made.append((str(config), overrides))
        return rows(PPO, 3 * 2**29) if str(config) == "ppo.yaml" else rows(GRPO, 2**30)

    monkeypatch.setattr(bench_step, "run", run)

    def call(*words):
        made.clear()
        monkeypatch.setattr(sys, "argv", ["bench_step", "--config", "ppo.yaml", *words])
        bench_step.main()
        return list(made), capsys.readouterr().out

    return call


def test_a_run_is_measured_after_its_first_step_and_its_memory_with_it(printed, tmp_path):
    made, out = printed("--json", str(tmp_path / "rows.jsonl"))
    assert made == [("ppo.yaml", [])]
    assert "critic's update" in out and "1000" not in out and "3.00 GiB" in out and "times" not in out
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_training_is_compared_in_updates_of_another_configuration_with_the_same_settings_behind(printed):
    made, out = printed("--against", "grpo.yaml", "--train.minibatches", "4")
    assert made == [(name, ["--train.minibatches", "4"]) for name in ("ppo.yaml", "grpo.yaml")]
    assert "training on a step's samples: 8.500 s, an update of --against: 4.000 s: 2.12 times" in out
    assert "old_log_p 0.25, critic_model 0.25, adv 0.12, update_critic 0.75, update 0.75" in out
    assert "all of the training of --against: 5.000 s: 1.70 times" in out
    assert "peak memory of a rank: 3.00 GiB, of --against: 2.00 GiB: 1.50 times" in out


def test_a_run_without_updates_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match="--against made no update"):
        bench_step.compared(rows(PPO, 1)[1:], [{"memory/peak_bytes": 1.0}])
