"""What a rank does for checkpoints: writes its part, says when that is done, and reads it again."""

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd_rl.data.digests import digests_of
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.status import doing, set_status
from spmd_rl.distributed.world import World
from spmd_rl.health.preemption import preemption_event
from spmd_rl.training.checkpoint import TrainingState
from spmd_rl.training.trainer import Trainer
from spmd_rl.weights.files.checkpoint_reader import CheckpointSource
from spmd_rl.weights.files.weight_source import fill_shard
from spmd_rl.weights.transfer.boxes import Shard

WEIGHTS = "training"
"""In a checkpoint's directory: Megatron's own, of the policy and its optimizer."""
_LOOK_SECONDS = 0.1


class ShardSaver:
    """A rank's side of the checkpoints. All ranks call the same methods in the same order, but `digests`."""

    def __init__(self, trainer: Trainer, shard: Shard, world: World) -> None:
        self._trainer, self._shard, self._world = trainer, shard, world
        self._state = TrainingState(trainer.policy, trainer.optimizer, world.payload)
        self._hashing: _Hashing | None = None
        self._failed: str | None = None
        """Why what was begun can't be written."""
        self._writing: Path | None = None
        self._asked = preemption_event()

    def bytes(self) -> int:
        """What this rank will write, about."""
        return self._state.bytes()

    def begin(self, directory: Path) -> None:
        """Write into a directory that all ranks see; training may go on when this returns.

        Raises RuntimeError where weights or the optimizer's state are not finite: nothing could go on from them. Where
        they are in the host's memory, the writers look, and `progress` raises it.
        """
        on_host = all(parameter.is_cpu for parameter in self._trainer.parameters().values())
        if not on_host and (broken := self._broken()):  # a fork can't read them there
            raise RuntimeError(broken)
        self._hashing, mine = None, None
        try:
            if self._world.rank == 0:
                (directory / WEIGHTS).mkdir()
            (directory / _rank_file(self._world.rank)).write_text(json.dumps(_generators()))
        except OSError as error:
            mine = f"rank {self._world.rank}, in {directory}: {error}"
        self._failed = next((why for why in gather(mine, self._world.payload) if why), None)
        if not self._failed:
            self._writing = directory / WEIGHTS
            # They are made anew in the next step. A fork that had them would keep them in memory until it has written.
            self._trainer.gradients.release()
            with doing("copies its state for a checkpoint"):
                self._state.begin_save(directory / WEIGHTS, self._broken if on_host else str)

    def _broken(self) -> str:
        """Why this rank's state must not be saved; "" for a sound one."""
        name = self._trainer.broken()
        return name and (
            f"rank {self._world.rank}: {name} holds values that are not finite, so nothing is saved; older "
            "checkpoints are as they were, and the run can go on from the newest of them"
        )

    def progress(self, wait: bool) -> dict[str, Any]:
        """Whether what was begun is written, what failed, and whether this rank was asked to save and end.

        Raises RuntimeError where what was to be saved is not finite.
        """
        written, failed, self._failed = True, self._failed, None
        try:
            written = self._wait() if wait else self._state.finish_save()
        except OSError as error:
            failed = str(error)
        return {"written": written, "failed": failed, "asked": self._asked.is_set()}

    def _wait(self) -> bool:
        """Until all ranks have written; a disk that takes bytes is slow, and no hang. The ranks agree on every turn."""
        size = -1
        with doing("checkpoint: waits for the disk"):
            while not self._state.finish_save():
                if (now := self._written_bytes()) != size:
                    size = now
                    set_status(doing=f"checkpoint: {size / 2**20:.1f} MiB are on disk")
                time.sleep(_LOOK_SECONDS)
        return True

    def _written_bytes(self) -> int:
        """Of the whole checkpoint, as far as this rank's node sees it."""
        try:
            return sum(file.stat().st_size for file in self._writing.iterdir()) if self._writing else 0
        except OSError:
            return 0

    def digests(self, directory: Path, names: Sequence[str], wait: bool) -> dict[str, str] | None:
        """The digests of some files of what was begun; None while they are being computed, beside training.

        Of a file that can't be read again there is the reason.
        """
        if self._hashing is None:
            self._hashing = _Hashing(directory, names)
        hashing = self._hashing
        if wait:
            with doing("reads its files of the checkpoint again"):
                hashing.wait()
        return None if hashing.is_alive() else hashing.found

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
            try:
                _restore_generators(json.loads(mine.read_text()))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ValueError(f"{mine}: no states of random generators ({type(error).__name__}: {error})") from error


class _Hashing(threading.Thread):
    """Reads files again, beside training."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        super().__init__(daemon=True)  # a rank that fails meanwhile does not wait for a disk that hangs
        self._directory, self._names, self._bytes = directory, names, 0
        self.found: dict[str, str] = {}
        self.start()

    def run(self) -> None:
        self.found = digests_of(self._directory, self._names, self._count)

    def _count(self, size: int) -> None:
        self._bytes += size

    def wait(self) -> None:
        """Until it is through; every part that was read is a sign of getting on."""
        said = 0
        while self.is_alive():
            self.join(_LOOK_SECONDS)
            if self._bytes != said:
                said = self._bytes
                set_status(doing=f"has read {said / 2**20:.1f} MiB of the checkpoint again")


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
