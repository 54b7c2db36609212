"""The configurations for clusters: each is checked against its model's sizes and planned, with nothing downloaded."""

import json
import re
from pathlib import Path

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.loading import load_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.model_directory import sizes_directory, with_local_models
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.plan.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
ROW = re.compile(r"\| `([\w*.]+\.yaml)` \|[^|]*\| (\d+) \| (\d+) \| (.*) \|")
TABLE = {name: (int(ranks), int(node)) for name, ranks, node, _ in ROW.findall((CONFIGS / "README.md").read_text())}
SHIPPED = {path.parent.name for path in (CONFIGS / "models").glob("*/config.json")}
LARGE = [name for name in TABLE if re.search(r"_a[23](_lab)?\.yaml$", name)]
# Parameters as the models' cards say, in billions.
BILLIONS = {
    "Qwen2.5-7B": 7.6,
    "Qwen2.5-7B-Instruct": 7.6,
    "Qwen2.5-32B": 32.8,
    "Qwen3-8B": 8.2,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Qwen2.5-VL-3B-Instruct": 3.8,
    "Qwen2.5-VL-7B-Instruct": 8.3,
    "Qwen2.5-VL-32B-Instruct": 33.5,
    "DeepSeek-R1-BF16": 671.0,
}


def test_the_table_has_every_file():
    files = {path.name for path in CONFIGS.glob("*.yaml")}
    assert {name for name in TABLE if "*" not in name} <= files
    assert {name for name in files - TABLE.keys() if not name.endswith("_demo_smollm2_cpu.yaml")} == set()


@pytest.mark.parametrize("name", LARGE)
def test_a_config_for_a_cluster_fits_its_model_at_its_world_size(name):
    config = load_config(["--config", str(CONFIGS / name)])
    names = {Path(path).name for path in (config.model.path, config.critic.path) if path}
    assert names <= SHIPPED
    config = with_machine_sizes(with_local_models(config, sizes_directory), "npu")
    assert [str(one) for one in check(config, TABLE[name][0], read_model_shape(config.model.path))] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (TABLE[name][0] > 100)) for name in LARGE]
)
def test_a_config_for_a_cluster_is_planned_from_the_shipped_sizes(name, capsys):
    ranks, node = TABLE[name]
    words = ["--config", str(CONFIGS / name), "--world-size", str(ranks), "--ranks-per-node", str(node), "--json"]
    main(words)
    answer = json.loads(capsys.readouterr().out)
    model = Path(answer["model"]["path"]).name
    assert abs(answer["model"]["parameters"] / 1e9 / BILLIONS[model] - 1) < 0.02
    assert answer["a_run_would_also_be_refused_for"] == [] and not answer["model"]["here"]


@pytest.mark.parametrize("name", LARGE)
def test_the_head_says_what_is_known_and_how_to_start(name):
    ranks, node = TABLE[name]
    head = (CONFIGS / name).read_text().partition("\nmodel:")[0]
    text = " ".join(head.replace("#", " ").split())
    assert "measured by us" in text and f"--world-size {ranks}" in text
    nodes = ranks // node
    program = "ppo" if name.startswith("ppo") else "grpo"
    sbatch = (
        f"sbatch {f'--nodes {nodes} ' if nodes > 1 else ''}launch/slurm/npu_{'a3' if '_a3' in name else 'a2'}.sbatch"
    )
    assert f"{sbatch} -m spmd_rl.{program} --config configs/{name}" in text
    assert f"NNODES={max(nodes, 2)} NODE_RANK=0 MASTER_ADDR=" in text and text.count(name) >= 3
