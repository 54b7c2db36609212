"""Make what all tests share: tiny random models, made once, and a real small one."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from deadlines import crowding
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

TESTS = Path(__file__).parent
# What tests start is this source too: not the one that is installed, nor that of the directory they are started from.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))
# Place -> the set that its tests belong to; the other markers stand at the tests.
MARKS = {"spmd/": "spmd", "launch/test_nodes.py": "spmd"}

# Of those without ranks, the longest first.
LONG_FILES = (
    *("weights/transfer/test_transfer_schedule", "test_plan_command", "rewards/rules/test_math_answer"),
    *("worker/test_same_grade", "rewards/test_hostile", "rewards/grading/test_pool", "platforms/test_table"),
    *("weights/transfer/test_checksum", "runtime/test_process", "rewards/test_audit", "health/test_heartbeat"),
)

# Machines are shared: how long an example takes says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# As DeepSeek-V3 is published, for fewer positions.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every combination, not just every pair of values")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in another order")


@pytest.hookimpl(tryfirst=True)  # before pytest brings together what shares a fixture
def pytest_collection_modifyitems(config, items):
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        for start, mark in MARKS.items():
            if place.startswith(start):
                item.add_marker(mark)
    # What takes long goes first: what takes little fills the end, where one of two workers would wait for the other.
    minutes = {item.path for item in items if "spmd" in item.keywords}
    rank = {TESTS / f"{name}.py": number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: -1 if item.path in minutes else rank.get(item.path, len(rank)))
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        files = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (item.path not in minutes, files[item.path], draw.random()))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout looks
def pytest_runtest_protocol(item, nextitem):
    if "spmd" in item.keywords and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(float(item.config.getini("timeout")) * crowding()))
    return (yield)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Name -> directory of a tiny random model."""
    root = tmp_path_factory.mktemp("models")
    directories = {
        "llama": make_tiny(root / "llama", "llama"),
        "qwen2-tied": make_tiny(root / "qwen2-tied", "qwen2", tied=True),
        "qwen3": make_tiny(root / "qwen3", "qwen3"),
        "qwen2_moe": make_tiny(root / "qwen2_moe", "qwen2_moe"),
        "qwen3_moe": make_tiny(root / "qwen3_moe", "qwen3_moe"),
        "deepseek_v3": make_tiny(root / "deepseek_v3", "deepseek_v3"),
        "deepseek_v3-yarn": make_tiny(root / "deepseek_v3-yarn", "deepseek_v3", q_lora_rank=None, rope_parameters=YARN),
        "qwen2_5_vl": make_tiny(root / "qwen2_5_vl", "qwen2_5_vl"),
    }
    for directory in directories.values():
        make_tokenizer(directory, vision="_vl" in directory.name)
    return {name: str(directory) for name, directory in directories.items()}


@pytest.fixture(scope="session")
def smollm2():
    """Directory of SmolLM2-135M-Instruct: SPMD_RL_DEMO_MODEL, or the demo's, which is made where it is missing."""
    root = Path(__file__).parents[1]
    directory = Path(os.environ.get("SPMD_RL_DEMO_MODEL", root / "models" / "smollm2-135m-instruct"))
    if not directory.exists():
        command = [sys.executable, str(root / "tools" / "make_demo_model.py"), "--output", str(directory)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"the demo model cannot be made here: {(made.stderr or made.stdout).strip()[-300:]}")
    return str(directory)
