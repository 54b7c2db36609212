"""The configs of the algorithms: each is the demo's run but for what its name says."""

from pathlib import Path

import pytest

from spmd_rl.algorithms.table import ADVANTAGES, LOSSES, try_algorithms
from spmd_rl.config.check_algorithm import algorithm_notes, algorithm_problems
from spmd_rl.config.loading import load_config, settings

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo_smollm2_cpu.yaml"
OTHERS = sorted(path for path in CONFIGS.glob("*_demo_smollm2_cpu.yaml") if not path.name.startswith("ppo"))


def read(path):
    return load_config(["--config", str(path)])


@pytest.mark.long
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_a_config_of_an_algorithm_is_the_demo_with_its_methods(path):
    config = read(path)
    assert algorithm_problems(config) == [] and algorithm_notes(config.algorithm) == []
    try_algorithms(config.algorithm)
    before, now = settings(read(DEMO)), settings(config)
    differ = {name for name in now if before.get(name) != now[name]}
    may = ("algorithm.", "reward.rules", "train.minibatches", "run.name")
    assert differ - {name for name in differ if name.startswith(may)} == set()
    assert any(name.startswith("algorithm.") for name in differ)


def test_every_advantage_and_loss_has_a_config():
    configs = [read(path).algorithm for path in OTHERS]
    unused = {"grpo", "group_norm"}
    assert {config.advantage for config in configs} | unused >= ADVANTAGES.functions.keys() - {"gae"}
    assert {config.loss for config in configs} >= LOSSES.functions.keys()
