"""Save and load a learner: its weights and its optimizer's state, as a distributed checkpoint.

Megatron's `dist_checkpointing` in its `fully_reshardable` form, so that any layout reads what any other wrote. Saving
is asynchronous: the call returns when a copy of the process (a fork) has the state, and that copy writes while training
goes on. Where a process must not be copied, a thread writes a copy of the state on the host.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from spmd_rl.distributed.gather import gather
from spmd_rl.health.parent_death import die_with_all
from spmd_rl.patches.checkpoint_writes import failures
from spmd_rl.platforms import current
from spmd_rl.training.checkpoint_pieces import save_own_pieces
from spmd_rl.training.checkpoint_thread import calls_queue, in_this_process
from spmd_rl.training.learner import Learner
from spmd_rl.weights.files.checkpoint_layout import CONTENT
from spmd_rl.weights.files.checkpoint_reader import Checkpoint

_OPTIMIZER = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class TrainingState:
    """The state of one learner, to be saved and loaded; every method is a collective act of all ranks."""

    def __init__(self, learner: Learner, control: dist.ProcessGroup | None = None) -> None:
        """`control`: a group for small things that the ranks tell each other; by default the one of all ranks."""
        self._model, self._optimizer, self._control = learner.model.module, learner.optimizer, control
        self._directory, self._note = Path(), _Note()
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._calls = calls_queue(current().forks)
        for inner in self._optimizer.distributed:
            save_own_pieces(inner, self._optimizer)
        # Who writes what is the same in every save: agreed upon in the first, and kept.
        self._strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True), self._group, do_cache_distribution=True
        )
        self._saved_before = False

    def bytes(self) -> int:
        """Return what this rank writes, about: its share of weights, float32 parameters and two moments of each."""
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        trained = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        return (weights + 12 * trained) // self._group.size()

    def begin_save(self, directory: Path, broken: Callable[[], str] = str) -> None:
        """Save into a directory that exists and is empty. Complete when `finish_save` says so.

        `broken`: says why this rank's state must not be saved, or "". It is asked in the fork, while training goes on;
        where there is none, it is asked first.
        """
        self._note = _Note()
        self._directory = directory
        self._optimizer.begin_state()
        # The values of a device are copied to the host before the fork.
        state = self._sharded(loading=False)
        apply_factories(state)
        dict_list_map_inplace(_in_place, state)
        request = dist_checkpointing.save(
            state,
            str(directory),
            self._strategy,
            validate_access_integrity=not self._saved_before,
            async_sharded_save=True,
            content_metadata=CONTENT | _OPTIMIZER,
        )
        self._saved_before = True
        if request.async_fn is not None and not current().forks:
            request = in_this_process(request, self._note.leave, broken())
        elif request.async_fn is not None:
            write = partial(_as_writer, os.getpid(), self._note, broken, request.async_fn)
            request = request._replace(async_fn=write)
        else:  # other ranks write all that this one has
            self._note.leave(broken())
        self._calls.schedule_async_request(request)

    def finish_save(self) -> bool:
        """Tell whether nothing is being saved any more.

        Raises OSError on all ranks, with the reasons of each, when something could not be written, and RuntimeError on
        a rank whose state must not be saved, with what `broken` said.
        """
        try:
            self._calls.maybe_finalize_async_calls(blocking=False)
        except CheckpointException as error:  # of all ranks at once; it has the reasons on rank 0
            reasons = [f"rank {rank}: {_first_line(why)}" for rank, (why, _) in error.failures.items()]
            failures.extend(OSError(reason) for reason in reasons)
            written = True
        else:
            written = self._calls.get_num_unfinalized_calls() == 0
        if written and self._directory != Path():
            broken = self._note.read()
            mine = [broken] if broken else [_first_line(error) for error in failures]
            found = [why for part in gather(mine, self._control) for why in part]
            place, self._directory = self._directory, Path()
            failures.clear()
            if broken:
                raise RuntimeError(broken)
            if found:
                free = shutil.disk_usage(place).free
                raise OSError(f"{place}: {'; '.join(found)}; {free:,} bytes are free there now")
        return written

    def load(self, directory: Path) -> None:
        """Take weights and optimizer state from a checkpoint of any layout.

        Raises ValueError that names what is wrong with it.
        """
        Checkpoint(directory)  # says of each missing or short file what it should hold
        for part in self._optimizer.each():
            part.make_state()  # what is loaded into
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(directory)), self._group)
        try:
            found = dist_checkpointing.load(self._sharded(loading=True), str(directory), strategy)
        except CheckpointException as error:  # of all ranks
            why = next((why for why, _ in error.failures.values()), error)
            if isinstance(why, ValueError) and str(directory) in str(why):
                raise why from None
            raise ValueError(_unfit(directory, why)) from error
        except (CheckpointingException, KeyError, AssertionError, RuntimeError) as error:
            raise ValueError(_unfit(directory, error)) from error
        for key, chunk in self._chunks():
            chunk.load_state_dict(found[key])
        self._optimizer.load(found["optimizer"])

    def _chunks(self) -> list[tuple[str, Any]]:
        if len(self._model) == 1:
            return [("model", self._model[0])]
        return [(f"model{n}", chunk) for n, chunk in enumerate(self._model)]

    def _sharded(self, loading: bool) -> dict[str, Any]:
        metadata = CONTENT | _OPTIMIZER | {"dp_cp_group": self._group}
        state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in self._chunks()}
        models = state["model"] if "model" in state else dict(state)
        state["optimizer"] = self._optimizer.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
        return state


def _unfit(directory: Path, error: BaseException) -> str:
    return (
        f"{directory}: it can't be loaded into this model and optimizer ({_first_line(error)}); is it of another run?"
    )


def _first_line(error: BaseException) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), "").removeprefix("Worker failure: ")
    if "inline_container" in said:  # torch's archives: where it stands in torch's source tells nobody anything
        return "a write failed"
    return (said if isinstance(error, OSError) or "[Errno" in said else f"{type(error).__name__}: {said}")[:300]


class _Note:
    """A line that a fork leaves for the process it came from, in memory that both share."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("note"), "w+b")

    def leave(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()

    def read(self) -> str:
        self._file.seek(0)
        return self._file.read().decode()


def _as_writer(
    rank: int, note: _Note, broken: Callable[[], str], write: Callable[..., None], *arguments: Any, **options: Any
) -> None:
    """Write in a forked process, unless there is something broken. It and the processes that it forks end with the
    rank: another attempt of the run writes the same files anew, and one that was left behind would write into them.
    """
    die_with_all(rank)
    torch.set_num_threads(1)  # the threads that the rank computed with are not in its fork
    if why := broken():
        note.leave(why)
    else:
        write(*arguments, **options)


def _in_place(described: Any) -> Any:
    """Have a part of a larger storage written from where it is: Megatron copies it first, while training waits.

    The fork has the values of this moment anyway. What is offloaded is left as it is: it is copied to the host.
    """
    if not current().offloads and isinstance(described, ShardedTensor) and described.data is not None:
        data = described.data.detach()
        if data.is_contiguous() and data.numel():
            bits = data.view(-1).view(torch.uint8)
            described.data = torch.from_numpy(bits.numpy()).view(data.dtype).view(data.shape)
    return described
