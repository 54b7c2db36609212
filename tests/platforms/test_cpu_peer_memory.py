"""Reading another process's memory gives what lies there, however both sides are cut."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.platforms.cpu_peer_memory import PeerMemory, Place, _readv


def myself() -> PeerMemory:
    """A group of one, that treats this process as its neighbour."""
    memory = PeerMemory(0, lambda item: [item], lambda: None)
    memory._pids = [os.getpid()]
    return memory


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_a_tensor_arrives_in_any_box_of_another(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    here_at = [data.draw(st.integers(0, 3)) for _ in sizes]
    there_at = [data.draw(st.integers(0, 3)) for _ in sizes]
    lead = data.draw(st.integers(0, 1))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    there = torch.randn([3] * lead + [a + n + 1 for a, n in zip(there_at, sizes, strict=True)]).to(dtype)
    here = torch.zeros([a + n + 2 for a, n in zip(here_at, sizes, strict=True)], dtype=dtype)
    box = tuple(slice(a, a + n) for a, n in zip(here_at, sizes, strict=True))
    memory = myself()
    memory.publish({"p": there})
    memory.read(0, [("p", (2,) * lead + tuple(there_at), here[box])])
    wanted = (there[2] if lead else there)[tuple(slice(a, a + n) for a, n in zip(there_at, sizes, strict=True))]
    assert torch.equal(here[box], wanted)
    assert int((here != 0).sum()) == int((wanted != 0).sum())


def test_more_pieces_than_the_kernel_takes_at_once_arrive():
    there, here = torch.randn(3000, 4), torch.zeros(3000, 2)
    memory = myself()
    memory.publish({"p": there})
    memory.read(0, [("p", (0, 1), here)])
    assert torch.equal(here, there[:, 1:3])


def test_a_rank_whose_memory_cannot_be_read_is_not_in_reach():
    memory = myself()
    assert not memory._holds(os.getpid(), 8, b"0123456789abcdef")
    assert not memory._holds(2**22 + 1, 8, b"0123456789abcdef")
    assert not memory.any


def test_memory_that_is_not_there_is_an_error_that_says_so():
    here = np.zeros(8, dtype=np.uint8)
    memory = myself()
    memory._places = [{"p": Place(8, (1,))}]
    with pytest.raises(OSError, match="bytes of process"):
        memory.read(0, [("p", (0,), torch.from_numpy(here))])
    with pytest.raises(OSError):
        _readv(os.getpid(), np.array([[0, 8]], np.uint64), np.array([[8, 8]], np.uint64), 8)
