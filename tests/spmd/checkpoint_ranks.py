"""Ranks of tests/spmd/test_broken_saves.py: a tiny policy, saved where there is no room, and loaded from a trap."""

import dataclasses
import json
import shutil
from pathlib import Path

from spmd.hostile import HARMS, set_trap
from spmd.ranks import arguments, end_megatron, join, ready, report


def main() -> None:
    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.models.model_shape import read_model_shape

    platform = ready("megatron_core")
    import psutil
    import torch.distributed as dist

    from spmd_rl.data.answers import Progress
    from spmd_rl.distributed.gather import gather
    from spmd_rl.worker.shard_saver import ShardSaver
    from spmd_rl.worker.trainer import Trainer

    world = join(platform)
    asked = arguments()
    shape = read_model_shape(asked["model"])
    config = dataclasses.replace(Config(model=ModelConfig(path=asked["model"], dtype="float32")))
    trainer = Trainer(config, shape, platform.device(world.local_rank), world)
    learner = trainer.learners["policy"]
    for inner in learner.optimizer.distributed:
        inner._init_optimizer_states_with_dummy_values()  # as after a first step
    saving = ShardSaver(trainer.learners, world)
    said = []
    rank_files_bytes = 0

    def together(act, *given) -> None:
        """Rank 0 does something to the disk."""
        if world.rank == 0:
            act(*given)
        dist.barrier(group=world.payload)

    def save(directory: Path, in_the_way: str = "") -> str | None:
        nonlocal rank_files_bytes
        together(lambda: directory.mkdir(parents=True))
        saving.begin_checkpoint(str(directory))
        if in_the_way:  # where rank 0 alone will write, at the end
            together(lambda: (directory / "training" / in_the_way).mkdir())
        try:
            outcome = saving.checkpoint_progress(wait=True)
        except RuntimeError as error:  # of one rank alone
            outcome = Progress(written=True, failed=f"raised: {error}", asked=False)
        dist.barrier(group=world.payload)
        assert outcome.written
        rank_files_bytes = sum(-(-file.stat().st_size // 4096) * 4096 for file in directory.glob("random_*"))
        dist.barrier(group=world.payload)  # nobody changes what another still looks at
        return outcome.failed

    def fill(directory: Path, left: int) -> None:
        ballast = directory / "ballast"
        ballast.write_bytes(b"")
        blocks = shutil.disk_usage(directory).free - left
        ballast.write_bytes(bytes(max(blocks, 0)))

    def clear(directory: Path) -> None:
        for found in directory.iterdir():
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    def unsound(part: str, rank: int, value: str) -> None:
        """Of a rank's first parameter, or of its first moment: one element."""
        if world.rank == rank:
            tensors = learner.model.weights().items() if part == "weight" else learner.optimizer.tensors()
            kept = next(tensor for name, tensor in tensors if part == "weight" or part in name)
            flat = kept.detach().view(-1)
            undo.append((flat, flat[:1].clone()))
            flat[0] = float(value)

    undo: list = []
    for act, place, *more in asked["steps"]:
        directory = Path(place)
        match act:
            case "save":
                said.append(save(directory, *more))
            case "load":
                try:
                    said.append(saving.load(directory, False))
                except ValueError as error:
                    said.append(str(error))
                dist.barrier(group=world.payload)  # nobody changes what another still reads
            case "fill":  # leave so many bytes, or as many as the ranks' own files take
                together(fill, directory, more[0] if more else rank_files_bytes)
            case "clear":
                together(clear, directory)
            case "trap":
                together(set_trap, directory, more[0], Path(more[1]))
            case "harm":
                together(HARMS[more[0]], directory / more[1])
            case "unsound":
                unsound(*more)
            case "sound":
                while undo:
                    flat, was = undo.pop()
                    flat[:1] = was
            case "gather":
                said.append(
                    gather([world.rank, "é" * world.rank * 999, None, b"\x00", {"a": (1.5, 2**40)}], world.payload)
                )
            case "children":
                said.append([child.status() for child in psutil.Process().children(recursive=True)])
    report(world.rank, {"said": json.loads(json.dumps(said, default=list))})
    dist.barrier(group=world.payload)
    end_megatron()
