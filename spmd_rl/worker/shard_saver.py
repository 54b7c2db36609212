"""A rank's part in checkpoints: it writes its shard, says when that is done, and reads it again."""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd_rl.data.answers import Progress
from spmd_rl.data.digests import digests_of
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.status import doing, set_status
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.health.preemption import preemption_event
from spmd_rl.patches.checkpoint_writes import failures
from spmd_rl.runlog.checkpoint_store import CheckpointStore, sizes_of, step_of
from spmd_rl.training.checkpoint import TrainingState
from spmd_rl.training.learner import Learner, take_turns
from spmd_rl.weights.files.checkpoint_reader import CheckpointSource
from spmd_rl.weights.files.weight_source import fill_shard

WEIGHTS = "training"
"""In a checkpoint's directory: Megatron's own, of the policy and its optimizer. Of another learner: training_NAME."""
_LOOK_SECONDS = 0.1


class ShardSaver:
    """A rank's side of the checkpoints. All ranks call the same methods in the same order."""

    def __init__(self, learners: Mapping[str, Learner], world: World, own: CheckpointStore | None = None) -> None:
        """`own`: the checkpoints of this node, where nodes share no disk."""
        self._learners, self._world, self._own = learners, world, own
        self._node, self._leads = world.node, world.rank == 0 if own is None else world.local_rank == 0
        self._states = {name: TrainingState(learner, world.payload) for name, learner in learners.items()}
        self._hashing: _Hashing | None = None
        self._failed: str | None = None
        """Says why what was begun can't be written."""
        self._writing: Path | None = None
        self._asked = preemption_event()
        self.on_save: Callable[[Path], None] = lambda directory: None
        """Sees each directory that a learner's state is about to be written into."""

    @verb
    def checkpoint_bytes(self) -> int:
        """Return what this rank will write, about; of a rank that writes to a disk that rank 0 does not see, 0."""
        return self._bytes() if self._own is None or self._node == 0 else 0

    def _bytes(self) -> int:
        return sum(state.bytes() for state in self._states.values())

    @verb
    def begin_checkpoint(self, directory: str) -> None:
        """Write into a directory that all ranks see, or into the one of its name on this node.

        Training may go on when this returns.

        Raises RuntimeError where weights or the optimizer's state are not finite: nothing could go on from them. Where
        they are in the host's memory, the writers look, and `checkpoint_progress` raises it.
        """
        self._begin(self._here(directory))

    def _here(self, directory: str) -> Path:
        """Return where this node has a checkpoint that rank 0 has there."""
        return Path(directory) if self._own is None else self._own.directory / Path(directory).name

    def _begin(self, directory: Path) -> None:
        weights = [weight for learner in self._learners.values() for weight in learner.model.weights().values()]
        on_host = all(weight.is_cpu for weight in weights)
        for name, learner in () if on_host else self._learners.items():  # a fork can't read them there
            take_turns(self._learners, name)
            if broken := self._broken(learner):
                raise RuntimeError(broken)
        self._hashing, self._failed = None, None
        if self._own is not None:
            each = gather(self._bytes(), self._world.payload)
            self._failed = self._tried(directory, partial(self._begin_part, each, directory))
        self._failed = self._failed or self._tried(directory, partial(self._make, directory))
        if not self._failed:
            self._writing = directory
            # They are made anew in the next step. A fork that had them would keep them in memory until it has written.
            for learner in self._learners.values():
                learner.gradients.release()
            failures.clear()
            with doing("copies its state for a checkpoint"):
                for name, state in self._states.items():
                    take_turns(self._learners, name)
                    self.on_save(_directory(directory, name))
                    broken = partial(self._broken, self._learners[name]) if on_host else str
                    state.begin_save(_directory(directory, name), broken)

    def _tried(self, directory: Path, act: Callable[[], None]) -> str | None:
        """Do in a directory what all ranks do; returns, alike on all of them, why one could not."""
        mine = None
        try:
            act()
        except OSError as error:
            mine = f"rank {self._world.rank}, in {directory}: {error}"
        return next((why for why in gather(mine, self._world.payload) if why), None)

    def _begin_part(self, each: Sequence[int], directory: Path) -> None:
        """Make the directory of this node, where it is another than rank 0's; `each`: bytes of each rank."""
        if self._own is not None and self._leads and self._node:
            rank = self._world.rank
            self._own.begin(
                step_of(directory.with_suffix("")) or 0, sum(each[rank : rank + self._world.ranks_per_node])
            )
            self._make_learners(directory)

    def _make(self, directory: Path) -> None:
        if self._world.rank == 0:
            self._make_learners(directory)
        (directory / _rank_file(self._world.rank)).write_text(json.dumps(_generators()), encoding="utf-8")

    def _make_learners(self, directory: Path) -> None:
        for name in self._states:
            _directory(directory, name).mkdir()

    def _broken(self, learner: Learner) -> str:
        """Return why this rank's state must not be saved; "" for a sound one."""
        name = learner.broken()
        return name and (
            f"rank {self._world.rank}: {name} holds values that are not finite, so nothing is saved; older "
            "checkpoints are as they were, and the run can go on from the newest of them"
        )

    @verb
    def checkpoint_progress(self, wait: bool) -> Progress:
        """Tell whether what was begun is written, what failed, and whether this rank was asked to save and end.

        Raises RuntimeError where what was to be saved is not finite.
        """
        written = self._wait() if wait else self._finish()
        failed = None
        if written:
            failed, self._failed = self._failed, None
        return Progress(written, failed, self._asked.is_set())

    def _finish(self) -> bool:
        """Ask of every learner's state whether it is written, also when another's could not be: ranks ask alike."""
        written, broken = True, None
        for state in self._states.values():
            try:
                written &= state.finish_save()
            except OSError as error:
                self._failed = self._failed or str(error)
            except RuntimeError as error:
                broken = broken or error
        if broken is not None:
            raise broken
        return written

    def _wait(self) -> bool:
        """Until all ranks have written; a disk that takes bytes is slow, and no hang. The ranks agree on every turn."""
        size = -1
        with doing("checkpoint: waits for the disk"):
            while not self._finish():
                if (now := self._written_bytes()) != size:
                    size = now
                    set_status(doing=f"checkpoint: {size / 2**20:.1f} MiB are on disk")
                time.sleep(_LOOK_SECONDS)
        return True

    def _written_bytes(self) -> int:
        """Of the whole checkpoint, as far as this rank's node sees it."""
        try:
            return sum(file.stat().st_size for file in self._writing.rglob("*")) if self._writing else 0
        except OSError:
            return 0

    @verb
    def checkpoint_files(self, directory: str) -> dict[str, list[int]]:
        """Return what this node has of a checkpoint, if rank 0 does not see it: bytes of each file, and its number."""
        told = self._own is not None and self._leads and self._node
        return {name: [size, self._node] for name, size in sizes_of(self._here(directory)).items()} if told else {}

    @verb
    def complete_checkpoint(self, name: str, texts: dict[str, str]) -> list[str]:
        """Give this node's part of a checkpoint its name; returns why that failed."""
        try:
            if self._own is not None and self._leads and self._node:
                self._own.complete_part(name, texts)
        except OSError as error:
            return [f"rank {self._world.rank}: {error}"]
        return []

    @verb
    def checkpoint_digests(self, directory: str, names: Sequence[str], wait: bool) -> dict[str, str] | None:
        """Return the digests of this rank's share of files; None while they are being computed, in the background.

        Of a file that can't be read again there is the reason.
        """
        if self._hashing is None:
            here, share = self._here(directory), slice(self._world.rank, None, self._world.size)
            if self._own is not None:
                share = slice(self._world.local_rank, None, self._world.ranks_per_node)
                names = [name for name in names if (here / name).is_file()]
            self._hashing = _Hashing(here, names[share])
        hashing = self._hashing
        if wait:
            with doing("reads its files of the checkpoint again"):
                hashing.wait()
        return None if hashing.is_alive() else hashing.found

    def load(self, directory: Path, only_weights: bool) -> list[str]:
        """Take up training where a checkpoint left it, or its weights alone.

        Returns the learners that begin anew: of the weights alone those that the checkpoint's run did not have.
        """
        anew = []
        if only_weights:
            for name, learner in self._learners.items():
                if name != "policy" and not _directory(directory, name).is_dir():
                    anew.append(name)
                    continue
                take_turns(self._learners, name)
                source = CheckpointSource(_directory(directory, name), learner.model.shape)
                fill_shard(source, learner.model.shard, learner.model.weights())
                learner.optimizer.take_weights()
            return anew
        for name, state in self._states.items():
            take_turns(self._learners, name)
            state.load(_directory(directory, name))
        mine = directory / _rank_file(self._world.rank)
        others = len(list(directory.glob(_rank_file(None))))
        if others == self._world.size:  # with another number of ranks there is nobody to continue
            try:
                _restore_generators(json.loads(mine.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ValueError(f"{mine}: no states of random generators ({type(error).__name__}: {error})") from error
        return anew


class _Hashing(threading.Thread):
    """Reads files again, in the background."""

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


def _directory(checkpoint: Path, learner: str) -> Path:
    return checkpoint / (WEIGHTS if learner == "policy" else f"{WEIGHTS}_{learner}")


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
