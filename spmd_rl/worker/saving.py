"""What a rank does for checkpoints: writes its part, says when that is done, and reads it again."""

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.data.files import digest
from spmd_rl.distributed.asked import listen
from spmd_rl.distributed.world import World
from spmd_rl.training.checkpoint import TrainingState
from spmd_rl.training.trainer import Trainer
from spmd_rl.weights.checkpoint_sources import CheckpointSource, fill_shard
from spmd_rl.weights.layout import Shard

WEIGHTS = "training"
"""In a checkpoint's directory: Megatron's own, of the policy and its optimizer."""


class Saving:
    """A rank's side of the checkpoints. All ranks call the same methods in the same order, but `digests`."""

    def __init__(self, trainer: Trainer, shard: Shard, world: World) -> None:
        self._trainer, self._shard, self._world = trainer, shard, world
        self._state = TrainingState(trainer.policy, trainer.optimizer)
        self._hashing: tuple[threading.Thread, dict[str, str]] | None = None
        self._asked = listen()

    def bytes(self) -> int:
        """What this rank will write, about."""
        return self._state.bytes()

    def begin(self, directory: Path) -> None:
        """Write into a directory that all ranks see; training may go on when this returns."""
        self._hashing = None
        if self._world.rank == 0:
            (directory / WEIGHTS).mkdir()
        dist.barrier(group=self._world.payload)
        (directory / _rank_file(self._world.rank)).write_text(json.dumps(_generators()))
        # They are made anew in the next step. A fork that had them would keep them in memory until it has written.
        self._trainer.gradients.release()
        self._state.begin_save(directory / WEIGHTS)

    def progress(self, wait: bool) -> dict[str, Any]:
        """Whether what was begun is written, what failed, and whether this rank was asked to save and end."""
        try:
            return {"written": self._state.finish_save(wait), "failed": None, "asked": self._asked.is_set()}
        except Exception as error:  # Megatron's own, with the reasons of all ranks in its text
            return {"written": True, "failed": f"{type(error).__name__}: {error}", "asked": self._asked.is_set()}

    def digests(self, directory: Path, names: Sequence[str], wait: bool) -> dict[str, str] | None:
        """The digests of some files of what was begun; None while they are being computed, beside training."""
        if self._hashing is None:
            found: dict[str, str] = {}
            thread = threading.Thread(target=lambda: found.update((n, digest(directory / n)) for n in names))
            thread.start()
            self._hashing = thread, found
        thread, found = self._hashing
        if wait:
            thread.join()
        return None if thread.is_alive() else found

    def load(self, directory: Path, only_weights: bool) -> None:
        """Take up training where a checkpoint left it, or its weights alone."""
        if only_weights:
            source = CheckpointSource(directory / WEIGHTS, self._trainer.shape)
            fill_shard(source, self._shard, self._trainer.parameters())
            self._trainer.optimizer.take_weights()
            return
        self._state.load(directory / WEIGHTS)
        mine = directory / _rank_file(self._world.rank)
        others = len(list(directory.glob(_rank_file(None))))
        if others == self._world.size:  # with another number of ranks there is nobody to continue
            _restore_generators(json.loads(mine.read_text()))


def _rank_file(rank: int | None) -> str:
    return "random_*.json" if rank is None else f"random_{rank:05d}.json"


def _generators() -> dict[str, Any]:
    """The states of all random generators of this process. Samples do not depend on them: see data/seeds.py."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def _restore_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
