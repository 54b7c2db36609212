"""Test what Megatron-Core's forked writers leave to the rank that started them."""

import multiprocessing
import queue
import time

import pytest

from spmd_rl.patches.checkpoint_writes import _ending_writers, _remembered, _results_in_memory, failures


def test_a_forked_writers_results_arrive_whatever_their_size_and_whether_or_not_it_is_waited_for():
    queue_of = _results_in_memory(None)  # asked for one in each save
    results = queue_of()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    large = [b"x" * 1000] * 1000  # more than a pipe holds
    writer = multiprocessing.get_context("fork").Process(target=results.put, args=(large,))
    writer.start()
    writer.join(60)  # before anything is read, as Megatron-Core does
    assert writer.exitcode == 0
    assert results.get_nowait() == large
    with pytest.raises(queue.Empty):
        queue_of().get_nowait()  # of the next save


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
