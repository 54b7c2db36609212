"""One rank of tests/spmd/test_convert_megatron.py: Megatron itself loads converted checkpoints, and saves them."""

import os

from spmd.ranks import arguments, end_megatron, join, ready, report

METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


def main() -> None:
    from spmd_rl.models.model_shape import read_model_shape

    platform = ready("megatron_core")
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from spmd_rl.config.config import ParallelConfig, TrainConfig
    from spmd_rl.distributed.layout import TrainLayout
    from spmd_rl.training.megatron_config import transformer_config
    from spmd_rl.training.model import build_model
    from spmd_rl.training.parallel import start_parallel
    from spmd_rl.weights.families import megatron_shard
    from spmd_rl.weights.files.checkpoint_reader import CheckpointSource
    from spmd_rl.weights.files.hf_reader import load_shard
    from spmd_rl.weights.files.weight_source import fill_shard

    world = join(platform)
    results = []
    for case in arguments()["cases"]:
        shape = read_model_shape(case["model"])
        layout = TrainLayout.of(ParallelConfig(**case["parallel"]), world.size)
        if parallel_state.model_parallel_is_initialized():
            end_megatron()
        start_parallel(layout, 1)
        model = build_model(shape, layout, transformer_config(shape, layout, torch.float32, True, TrainConfig()))
        shard = megatron_shard(shape, layout, world.rank)
        expected = {name: torch.empty(size) for name, size in shard.params.items()}
        load_shard(case["model"], shard, expected, shape)

        def sharded(model=model) -> dict:
            return {f"model{n}": chunk.sharded_state_dict(metadata=dict(METADATA)) for n, chunk in enumerate(model)}

        for values in model.weights().values():
            values.fill_(float("nan"))
        loaded = dist_checkpointing.load(sharded(), case["checkpoint"])
        for n, chunk in enumerate(model):
            chunk.load_state_dict(loaded[f"model{n}"])
        held = model.weights()
        wrong = [name for name, values in expected.items() if not torch.equal(values, held[name])]
        again = {name: torch.empty(size) for name, size in shard.params.items()}
        fill_shard(CheckpointSource(case["checkpoint"], shape), shard, again)
        wrong += [f"fill_shard: {name}" for name, values in expected.items() if not torch.equal(values, again[name])]
        if case["save"]:
            if world.rank == 0:
                os.makedirs(case["save"])
            torch.distributed.barrier()
            dist_checkpointing.save(sharded(), case["save"])
        results.append({"wrong": wrong, "compared": len(expected), "parameters": len(held)})
    report(world.rank, {"cases": results})
