"""Ranks of tests/spmd/test_broken_saves.py: a tiny policy, saved where there is no room, and loaded from a trap."""

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path

from spmd.ranks import arguments, report


def main() -> None:
    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.config.model_shape import read_model_shape
    from spmd_rl.platforms.platform import current

    platform = current("cpu")
    for name, value in platform.environment.items():
        os.environ.setdefault(name, value)
    from spmd_rl.patches import megatron_core
    from spmd_rl.patches.patch import apply_all

    apply_all(megatron_core.PATCHES, "cpu")
    import psutil
    import torch
    import torch.distributed as dist

    from spmd_rl.distributed import world as worlds
    from spmd_rl.distributed.layout import TrainLayout
    from spmd_rl.training.parallel import start_parallel
    from spmd_rl.training.trainer import Trainer
    from spmd_rl.weights.families import megatron_shard
    from spmd_rl.weights.load import load_shard
    from spmd_rl.worker.saving import Saving

    world = worlds.start(platform, 60)
    asked = arguments()
    shape = read_model_shape(asked["model"])
    config = dataclasses.replace(Config(model=ModelConfig(path=asked["model"], dtype="float32")))
    layout = TrainLayout.of(config.parallel, world.size)
    shard = megatron_shard(shape, layout, world.rank)
    place = start_parallel(layout, 1)
    trainer = Trainer(
        config, shape, layout, place, torch.device("cpu"), lambda p, path: load_shard(path, shard, p, shape)
    )
    for inner in trainer.optimizer.distributed:
        inner._init_optimizer_states_with_dummy_values()  # as after a first step
    saving = Saving(trainer, shard, world)
    said = []

    def save(directory: Path) -> str | None:
        if world.rank == 0:
            directory.mkdir(parents=True)
        dist.barrier(group=world.payload)
        saving.begin(directory)
        outcome = saving.progress(wait=True)
        dist.barrier(group=world.payload)
        assert outcome["written"]
        return outcome["failed"]

    for step in asked["steps"]:
        match step:
            case ["save", directory]:
                said.append(save(Path(directory)))
            case ["load", directory]:
                try:
                    saving.load(Path(directory), False)
                    said.append(None)
                except ValueError as error:
                    said.append(str(error))
            case ["fill", directory, left]:
                # Leave so many bytes free.
                if world.rank == 0:
                    free = shutil.disk_usage(directory).free
                    with contextlib.suppress(OSError), open(Path(directory) / "ballast", "wb") as stream:
                        stream.write(bytes(max(free - left, 0)))
                dist.barrier(group=world.payload)
            case ["free", directory]:
                if world.rank == 0:
                    for found in Path(directory).iterdir():
                        shutil.rmtree(found) if found.is_dir() else found.unlink()
                dist.barrier(group=world.payload)
            case ["children"]:
                said.append([f"{c.pid} {c.status()}" for c in psutil.Process().children(recursive=True)])
    report(world.rank, {"said": json.loads(json.dumps(said))})
    dist.barrier(group=world.payload)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
