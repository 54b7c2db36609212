"""Megatron's own dist_checkpointing loads what we convert, at any layout, and we convert what it saves."""

import pytest
import torch
from safetensors.torch import load_file

from spmd.ranks import run_ranks
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.weights.files.convert import Limits, to_hf, to_megatron
from tiny_models import make_tiny

SPARSE = ("qwen2_moe", "qwen3_moe", "deepseek_v3")
ALONE = [{}]
DENSE_ON_TWO = [{"tensor": 2}, {"pipeline": 2, "virtual": 2}]
SPARSE_ON_TWO = [{"tensor": 2, "expert": 2}, {"tensor": 2, "expert_tensor": 2}]


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """Name -> directory of a tiny model of each family."""
    root = tmp_path_factory.mktemp("sparse")
    return tiny_models | {name: str(make_tiny(root / name, name, layers=2)) for name in SPARSE}


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_loads_a_converted_checkpoint_and_its_own_converts_back(models, tmp_path, ranks):
    cases = []
    for name, hf in models.items():
        converted = tmp_path / name
        layout = TrainLayout(2, 2, 1, expert=2 if name in SPARSE else 1)
        # In chunks that no rank has: loading has to look into several for each parameter.
        to_megatron(hf, converted, layout, limits=Limits(slice=20_000, unit=300_000))
        for n, parallel in enumerate(ALONE if ranks == 1 else SPARSE_ON_TWO if name in SPARSE else DENSE_ON_TWO):
            saves = ranks == 2 and n == 0 and name in ("qwen2-tied", "qwen3_moe", "deepseek_v3")
            save = str(tmp_path / f"{name}-saved") if saves else None
            cases.append({"model": hf, "checkpoint": str(converted), "parallel": parallel, "save": save})
    for rank in run_ranks("spmd.convert_ranks", ranks, {"cases": cases}):
        for case, result in zip(cases, rank["cases"], strict=True):
            assert result["compared"] == result["parameters"] > 0, case
            assert result["wrong"] == [], case
    for case in cases:
        if case["save"]:
            to_hf(case["save"], case["save"] + "-hf", hf=case["model"])
            saved, original = (load_file(f"{d}/model.safetensors") for d in (case["save"] + "-hf", case["model"]))
            assert saved.keys() == original.keys()
            assert all(torch.equal(saved[key], original[key]) for key in original), case
