"""Have Megatron-Core's writing of checkpoints fail on all ranks alike, and without processes that stay.

What it lets rank 0 alone write may fail there alone, when a disk is full, and the others would wait for it in the next
collective. It is remembered here instead, for whoever saves: he asks all ranks.
"""

import functools
import multiprocessing
import os
import pickle
import queue
import struct
from typing import Any

from spmd_rl.patches.patch import EVERYWHERE, MEGATRON_CORE, Patch

failures: list[Exception] = []
"""Errors of this rank's writing since this was emptied."""

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing"


def _remembered(original: Any) -> Any:
    @functools.wraps(original)
    def write(*arguments: Any, **options: Any) -> None:
        try:
            original(*arguments, **options)
        except (OSError, RuntimeError) as error:  # the second is torch.save's way to say that a write failed
            failures.append(error)

    return write


_LENGTH = struct.Struct("<Q")


class _Results:
    """Hands one object from a forked writer to the process that forked it, in memory that both share.

    A queue's pipe would do for small models only: it holds 64 KiB, and nobody reads it before the writer has ended.
    """

    def __init__(self) -> None:
        self._file = open(os.memfd_create("results"), "w+b")

    def put(self, result: Any) -> None:
        message = pickle.dumps(result)
        self._file.seek(_LENGTH.size)
        self._file.write(message)
        self._file.flush()
        # The length comes last: a writer that is killed before has left nothing.
        self._file.seek(0)
        self._file.write(_LENGTH.pack(len(message)))
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size or not any(head):
            raise queue.Empty
        return pickle.loads(self._file.read(_LENGTH.unpack(head)[0]))


def _results_in_memory(original: Any) -> Any:
    """Asked once for each save."""
    return _Results


def _ending_writers(original: Any) -> Any:
    @functools.wraps(original)
    def write(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        # In a forked process: these are its own. Where one failed, the rest may wait for somebody to take their results.
        for writer in multiprocessing.active_children():
            writer.kill()

    return staticmethod(write)


PATCHES = (
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:_get_write_results_queue",
        platforms=EVERYWHERE,
        reason="the results of writing a checkpoint go through a server process that is spawned for it: it takes seconds to "
        "start, and stays when its rank is killed",
        upstream=f"{_SOURCE}/strategies/filesystem_async.py#L51",
        until="Megatron-Core passes the results of its forked writers through memory of theirs",
        make=_results_in_memory,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "FileSystemWriterAsync.write_preloaded_data_multiproc",
        platforms=EVERYWHERE,
        reason="when one of a rank's writers failed, another can wait for ever for its results to be taken, and with it the "
        "process that waits for both",
        upstream=f"{_SOURCE}/strategies/filesystem_async.py#L288",
        until="the results of all writers are taken before their process ends",
        make=_ending_writers,
    ),
    *(
        Patch(
            package="megatron-core",
            versions=MEGATRON_CORE,
            target=target,
            platforms=EVERYWHERE,
            reason=f"rank 0 alone writes {what}; when the disk is full it raises there, and the others wait for it in the "
            "next collective",
            upstream=f"{_SOURCE}/{source}",
            until="Megatron-Core tells all ranks what one of them could not write",
            make=_remembered,
        )
        for target, what, source in (
            (
                "megatron.core.dist_checkpointing.strategies.common:TorchCommonSaveStrategy.save_common",
                "common.pt",
                "strategies/common.py#L40",
            ),
            (
                "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.finish",
                ".metadata",
                "strategies/state_dict_saver.py#L243",
            ),
            ("megatron.core.dist_checkpointing.serialization:save_config", "metadata.json", "serialization.py#L409"),
        )
    ),
)
