"""One rank of two of test_weight_transfer.py."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from spmd.ranks import arguments, join, ready, report
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.files.export import ExportSettings, export_hf
from spmd_rl.weights.files.hf_reader import load_shard
from spmd_rl.weights.transfer.boxes import common_boxes
from spmd_rl.weights.transfer.checksum import Checksums, verify
from spmd_rl.weights.transfer.transfer_schedule import Schedule
from spmd_rl.weights.transfer.weight_transfer import Traffic, WeightTransfer
from tests.weights.models import copied_elements, filled, model_shape, random_weights, received_elements, save_directory

WORLD = 2
CASES = [((2, 1, 1), 1), ((1, 1, 2), 2), ((1, 2, 1), 2), ((1, 2, 1), 1), ((2, 1, 1), 2)]


def main() -> None:
    """Every check is an assertion, but for what is reported."""
    rank = join(ready()).rank
    shape = model_shape(tied=True, qkv_bias=True)
    tensors = random_weights(shape)
    for sizes, rollout in CASES:
        refresh(rank, shape, tensors, TrainLayout(*sizes), RolloutLayout(rollout, WORLD))
    mixed_dtypes(rank, shape)
    wrong = wrong_replica(rank, shape, tensors)
    export(rank, Path(arguments()["directory"]), shape)
    report(rank, {"wrong": wrong})


def refresh(rank, shape, tensors, train, engines):
    """Training shards become engine shards, in place and through a function, with nothing superfluous on the wire."""
    sources = [megatron_shard(shape, train, r) for r in range(WORLD)]
    destinations = [vllm_shard(shape, engines, r) for r in range(WORLD)]
    read, expected = filled(sources[rank], tensors), filled(destinations[rank], tensors)
    boxes = common_boxes([*sources, *destinations])
    for bucket in (40, 1 << 24):
        mine = Schedule(sources, destinations, bucket_elements=bucket).plan(rank)
        mover = WeightTransfer(mine, sources[rank])
        held = {name: torch.zeros(size) for name, size in destinations[rank].params.items()}
        traffic = mover.run(read, held)
        assert traffic == Traffic(4 * received_elements(mine), 4 * copied_elements(mine))
        assert all(torch.equal(held[name], expected[name]) for name in expected)
        near = WeightTransfer(mine, sources[rank], sources=sources)
        again, complete = {name: torch.zeros(size) for name, size in destinations[rank].params.items()}, []
        assert near.run(read, again, complete.append) == traffic
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        assert sorted(complete) == sorted(expected)

        written = {}
        rollout, training = Checksums(destinations[rank], boxes, "rollout"), Checksums(sources[rank], boxes, "training")

        def write(name, tensor, written=written, rollout=rollout):
            assert name not in written
            written[name] = tensor.clone()
            rollout.update(name, tensor)

        assert mover.run(read, write) == traffic
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)
        training.update_all(read)
        verify([training, rollout], WORLD)


def mixed_dtypes(rank, shape):
    """Norms stay float32 while the rest is bfloat16, in the same messages."""
    train = TrainLayout(1, 2, 1)
    sources = [megatron_shard(shape, train, r) for r in range(WORLD)]
    destinations = [vllm_shard(shape, RolloutLayout(1, WORLD), r) for r in range(WORLD)]
    values = random_weights(shape)

    def cast(params):
        return {n: t if "norm" in n else t.bfloat16() for n, t in params.items()}

    held = {}
    mover = WeightTransfer(Schedule(sources, destinations).plan(rank), sources[rank])
    mover.run(cast(filled(sources[rank], values)), lambda name, tensor: held.update({name: tensor.clone()}))
    expected = cast(filled(destinations[rank], values))
    assert all(held[n].dtype == expected[n].dtype and torch.equal(held[n], expected[n]) for n in expected)


def wrong_replica(rank, shape, tensors):
    """Rank 1's engine has one wrong element: the text that both ranks raise."""
    train, engines = megatron_shard(shape, TrainLayout(1, 1, 2), rank), vllm_shard(shape, RolloutLayout(1, 2), rank)
    boxes = common_boxes([train, engines])
    held = filled(engines, tensors)
    held["model.layers.0.mlp.down_proj.weight"][2, 5] += rank
    training, rollout = Checksums(train, boxes, "training"), Checksums(engines, boxes, "rollout")
    training.update_all(filled(train, tensors))
    rollout.update_all(held)
    try:
        verify([training, rollout], WORLD)
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def export(rank, directory, shape):
    """Two ranks load a directory and write it again, tensor-parallel and as pipeline stages."""
    tensors = random_weights(shape, torch.bfloat16)
    if rank == 0:
        save_directory(directory / "source", tensors, files=2, dtype="bfloat16")
    dist.barrier()
    for layout in (TrainLayout(2, 1, 1), TrainLayout(1, 2, 1)):
        shards = [megatron_shard(shape, layout, r) for r in range(WORLD)]
        params = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in shards[rank].params.items()}
        load_shard(directory / "source", shards[rank], params, shape)
        export_hf(
            directory / "hf",
            directory / "source",
            shape,
            shards,
            params,
            rank,
            settings=ExportSettings(bucket_elements=50),
        )
        dist.barrier()
        again = {name: torch.empty_like(values) for name, values in params.items()}
        load_shard(directory / "hf", shards[rank], again, shape)
        assert all(torch.equal(params[name], again[name]) for name in params)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(directory / "hf")
        dist.barrier()
