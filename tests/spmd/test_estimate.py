"""The estimate of an update's memory against what torch allocates in one, by rank."""

import dataclasses

import pytest

from spmd.ranks import run_ranks
from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.estimate.activations import Activations
from spmd_rl.estimate.micro_batch import Lengths, MicroBatch
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.platforms import record
from tiny_models import make_tiny

SIZES = {"hidden": 256, "heads": 8, "ffn": 768, "vocabulary": 2048, "max_positions": 2048}
BATCH = {"prompt": 200, "response": 100, "samples": 8, "microbatches": 3}
LAYOUTS = [
    ("llama", {"tensor": 2}, {}),
    ("llama", {"pipeline": 2}, {}),
    ("qwen3_moe", {"expert": 2}, {}),
    ("llama", {}, {"recompute": "full"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(home / "llama", "llama", layers=6, kv_heads=2, **SIZES),
        "qwen3_moe": make_tiny(
            home / "qwen3_moe", "qwen3_moe", layers=6, kv_heads=2, moe_intermediate_size=192, **SIZES
        ),
    }


@pytest.mark.spmd
def test_what_an_update_allocates_is_predicted_within_a_tenth(models):
    cases = [
        {"model": str(models[name]), "parallel": parallel, "train": train, **BATCH} for name, parallel, train in LAYOUTS
    ]
    reports = run_ranks("spmd.memory_ranks", 2, {"cases": cases})
    # Of the allocations alone: what the heap of the process makes of them is another matter.
    kernels = dataclasses.replace(record("cpu").kernels, heap=1.0)
    batch = MicroBatch(1, BATCH["samples"], Lengths(BATCH["prompt"], BATCH["response"]), shared=True)
    said = {}
    for number, (name, parallel, train) in enumerate(LAYOUTS):
        base = Config(ModelConfig(str(models[name]), dtype="float32"))
        config = dataclasses.replace(
            base,
            parallel=dataclasses.replace(base.parallel, **parallel),
            train=dataclasses.replace(base.train, **train),
        )
        layout = TrainLayout.of(config.parallel, 2)
        counted = Activations(config, read_model_shape(models[name]), layout, kernels, batch)
        for rank, found in enumerate(reports):
            predicted = counted.learning(layout.coords(rank).pipeline, BATCH["microbatches"]).total
            said[name, str(parallel | train), rank] = (predicted, found["peaks"][number])
    print(said)
    assert {what: pair for what, pair in said.items() if abs(pair[0] / pair[1] - 1) > 0.1} == {}
