"""What Megatron-Core's forked writers leave to the rank that started them."""

import multiprocessing
import queue
import time

import pytest

from spmd_rl.patches.checkpoint_writes import _ending_writers, _remembered, _shared_result, failures


def test_a_result_of_any_size_is_there_when_the_process_that_made_it_has_ended():
    results = _shared_result(None)()
    for size in (10 << 20, 5):  # a pipe holds 64 KiB: its writer would wait for a reader, who waits for its end
        writer = multiprocessing.get_context("fork").Process(target=lambda size=size: results.put({0: "x" * size}))
        writer.start()
        writer.join(20)
        assert writer.exitcode == 0
        assert results.get_nowait() == {0: "x" * size}
        with pytest.raises(queue.Empty):
            results.get_nowait()


def test_a_writer_that_waits_for_ever_does_not_keep_the_one_that_started_it():
    def write():
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()

    writers = multiprocessing.get_context("fork").Process(target=_ending_writers(write))
    writers.start()
    writers.join(20)
    assert writers.exitcode == 0


def test_what_one_rank_cannot_write_is_remembered():
    def write(path):
        raise OSError(28, "No space left on device", path)

    failures.clear()
    _remembered(write)("common.pt")
    assert [str(error) for error in failures] == ["[Errno 28] No space left on device: 'common.pt'"]
    failures.clear()
