"""Write a checkpoint in a thread of the rank, where its process must not be copied."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def calls_queue(forks: bool) -> AsyncCallsQueue:
    """Return Megatron's queue of saves that are under way; each is written by a fork, or else by a thread."""
    return AsyncCallsQueue(persistent=False) if forks else _Threads(persistent=False)


def in_this_process(request: AsyncRequest, leave: Callable[[str], None], broken: str) -> AsyncRequest:
    """Return the request with its own copy of the values on the host, to be written without another process.

    `broken`: why nothing must be written, which is then left for whoever asks.
    """
    if broken:
        leave(broken)
        return request._replace(async_fn=None)
    transforms, _ = request.async_fn.args
    rank, buckets, results = request.async_fn_args
    staged = [
        # What was on the host already, preloading did not copy: training would change it while it is written.
        (file, key, (data, [(item, there.clone() if here.is_cpu else there) for (_, here), (item, there) in both]))
        for (_, _, (_, before)), (file, key, (data, after)) in zip(buckets, request.preload_fn(), strict=True)
        for both in [list(zip(before, after, strict=True))]
    ]
    return request._replace(async_fn=_write, async_fn_args=(transforms, staged, results), preload_fn=None)


def _write(transforms: list[Any], buckets: list[Any], results: Any) -> None:
    """Do what Megatron's write_preloaded_data_multiproc does with processes, one bucket after another."""
    found: dict[int, Any] | Exception = {}
    for index, bucket in enumerate(buckets):
        done, count = queue.Queue[Any](), queue.Queue[int]()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, done, count, True)
        _, written = done.get()
        if isinstance(written, Exception):
            found = written
            break
        found[index] = written
    results.put(found)


class _Threads(AsyncCallsQueue):
    """Megatron's queue, whose calls are threads."""

    def _get_async_caller(self) -> "_ThreadCaller":
        return _ThreadCaller()


class _ThreadCaller(TemporalAsyncCaller):
    """Writes in a thread; that it is alive, and waiting for it, are asked as of a process."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a thread with what the request asks for."""
        if async_req.async_fn is not None:
            self.start_time = time.time()
            # A rank that fails does not wait for a disk that hangs.
            self.process = threading.Thread(target=async_req.async_fn, args=async_req.async_fn_args, daemon=True)
            self.process.start()
