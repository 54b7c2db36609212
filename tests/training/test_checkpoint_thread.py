"""A checkpoint that a thread of the rank writes: what it held at the call, whatever training does meanwhile."""

import multiprocessing
import queue
from functools import partial

import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def item(tensor):
    chunk = ChunkStorageMetadata(torch.Size([0]), tensor.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.shape)
    return WriteItem(MetadataIndex("weight", torch.Size([0])), WriteItemType.SHARD, tensor_data=data)


def test_values_of_the_call_are_written_without_another_process(tmp_path, monkeypatch):
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from spmd_rl.training.checkpoint_thread import calls_queue, in_this_process

    def forked(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", forked)
    tensor, results = torch.arange(4.0), queue.Queue()
    buckets = [(str(tmp_path / "__0_0.distcp"), "__0_0.distcp", ([], [(item(tensor), tensor)]))]
    write = partial(FileSystemWriterAsync.write_preloaded_data_multiproc, [_StorageWriterTransforms()], False)
    # As preloading does with what is on the host already: nothing.
    request = AsyncRequest(write, (0, buckets, results), [], preload_fn=lambda: buckets)
    left = []
    caller = calls_queue(forks=False)._get_async_caller()
    caller.schedule_async_call(in_this_process(request, left.append, ""))
    tensor.zero_()  # training goes on
    caller.process.join(60)
    [written] = results.get_nowait()[0]
    with open(tmp_path / "__0_0.distcp", "rb") as file:
        assert torch.equal(torch.load(file), torch.arange(4.0)) and written.index.fqn == "weight"
    assert in_this_process(request, left.append, "a nan").async_fn is None and left == ["a nan"]


def test_a_disk_that_refuses_is_told_as_a_writer_of_its_own_would():
    from spmd_rl.training.checkpoint_thread import _write

    results = queue.Queue()
    tensor = torch.ones(2)
    _write([], [("/no/such/directory/file", "file", ([], [(item(tensor), tensor)]))], results)
    assert isinstance(results.get_nowait(), OSError)
