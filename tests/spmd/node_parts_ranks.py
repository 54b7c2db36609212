"""Ranks of tests/spmd/test_node_parts.py: each is a node with a disk of its own, and a tiny policy cut in two."""

import dataclasses
import os
from pathlib import Path

from spmd.ranks import arguments, end_megatron, join, ready, report


def main() -> None:
    from spmd_rl.config.checkpoint_config import CheckpointConfig
    from spmd_rl.config.config import Config, ModelConfig, ParallelConfig
    from spmd_rl.config.loading import settings
    from spmd_rl.models.model_shape import read_model_shape

    platform = ready("megatron_core")
    import torch
    import torch.distributed as dist

    from spmd_rl.distributed.gather import gather
    from spmd_rl.runlog.checkpoint_store import CheckpointStore
    from spmd_rl.runtime.node_parts import NodeParts
    from spmd_rl.runtime.resume_point import resume_point
    from spmd_rl.worker.shard_saver import ShardSaver
    from spmd_rl.worker.trainer import Trainer

    asked, joined = arguments(), join(platform)
    world = dataclasses.replace(joined, local_rank=0, ranks_per_node=1)
    disk = Path(asked["disks"]) / f"node{world.rank}"
    disk.mkdir(exist_ok=True)
    os.chdir(disk)  # the run's directory is called alike on all nodes
    config = Config(
        model=ModelConfig(path=asked["model"], dtype="float32"),
        parallel=ParallelConfig(tensor=2),
        checkpoint=CheckpointConfig(shared=False, keep_last=1),
    )
    trainer = Trainer(config, read_model_shape(asked["model"]), torch.device("cpu"), joined)
    learner, run_dir = trainer.learners["policy"], Path("runs/mine")
    for inner in learner.optimizer.distributed:
        inner._init_optimizer_states_with_dummy_values()  # as after a first step
    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint)
    saving = ShardSaver(trainer.learners, world, store)
    said: list = []

    def save(step: int) -> None:
        """Do what the checkpoint manager asks of the ranks, in its order."""
        expected = sum(gather(saving.checkpoint_bytes(), world.payload))
        directory = gather(str(store.begin(step, expected)) if world.rank == 0 else "", world.payload)[0]
        saving.begin_checkpoint(directory)
        assert saving.checkpoint_progress(wait=True).failed is None
        parts = gather(saving.checkpoint_files(directory), world.payload)
        elsewhere = {name: size for part in parts for name, size in part.items()}
        state = {"loop": {}, "settings": settings(config), "metrics": {}}
        names = gather(store.seal(step, state, elsewhere) if world.rank == 0 else [], world.payload)[0]
        digests: dict = {}
        for part in gather(saving.checkpoint_digests(directory, names, True), world.payload):
            digests |= part
        told: list = []
        if world.rank == 0:
            store.complete(step, digests, lambda *given: told.extend(given))
        assert saving.complete_checkpoint(*gather(told, world.payload)[0]) == []

    def here() -> list[str]:
        return sorted(str(path.relative_to(run_dir / "checkpoints")) for path in run_dir.rglob("*") if path.is_file())

    def resume(told: str = "auto") -> list:
        parts, chosen = NodeParts(config, run_dir, world), dataclasses.replace(config.checkpoint, resume=told)
        before, kept = here() if run_dir.exists() else [], {}
        try:
            notes = parts.bring(told)
            found, more = resume_point(dataclasses.replace(config, checkpoint=chosen), run_dir, world)
        except ValueError as error:
            return [str(error)]
        if found is not None:
            for name, weight in learner.model.weights().items():
                kept[name] = weight.clone()
                weight.zero_()
            saving.load(found.saved.path, only_weights=False)
            same = all(torch.equal(kept[name], weight) for name, weight in learner.model.weights().items())
            parts.drop()
            assert here() == before
            parts.begin_after(found.saved.step)
            return [found.saved.step, same, [*notes, *more]]
        return [0, False, [*notes, *more]]

    for act, *more in asked["steps"]:
        match act:
            case "save":
                save(*more)
            case "resume":
                said.append(resume(*more))
            case "files":
                said.append(here())
            case "lose":
                node, name = more
                if world.rank == node:
                    (run_dir / "checkpoints" / name).unlink()
            case "harm":
                node, name = more
                if world.rank == node:
                    file = run_dir / "checkpoints" / name
                    content = bytearray(file.read_bytes())
                    content[len(content) // 2] ^= 1
                    file.write_bytes(content)
        dist.barrier(group=world.payload)
    report(world.rank, {"said": said})
    dist.barrier(group=world.payload)
    end_megatron()
