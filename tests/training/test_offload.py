"""Laws of memory on the host, and of a learner whose state is nowhere else while the engine has the device."""

from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.training import offload
from spmd_rl.training.offload import Offloaded, block_sizes, pieces
from spmd_rl.weights.device_memory import parts_of_sizes

SIZES = st.lists(st.integers(0, 5 << 28), min_size=1, max_size=12)


@given(SIZES)
def test_blocks_are_powers_of_two_and_waste_less_than_a_mebibyte(sizes):
    blocks = block_sizes(sum(sizes))
    assert all(size & (size - 1) == 0 and size <= 1 << 30 for size in blocks)
    assert 0 <= sum(blocks) - sum(sizes) < 1 << 20


@given(SIZES)
def test_every_byte_has_one_place_of_its_own(sizes):
    blocks = block_sizes(sum(sizes))
    ends = [0] * len(sizes)
    taken = [0] * len(blocks)
    for tensor, start, block, at, count in pieces(sizes, blocks):
        assert start == ends[tensor] and at == taken[block] and count > 0
        ends[tensor], taken[block] = start + count, at + count
    assert ends == sizes and all(used <= size for used, size in zip(taken, blocks, strict=True))


def test_hundreds_of_tensors_wait_in_a_few_blocks_and_come_back(monkeypatch):
    # torch rounds each pinned block up to a power of two: in one of its own, each of these would take twice its bytes.
    monkeypatch.setattr(offload, "current", lambda: SimpleNamespace(offloads=True, synchronize=lambda: None))
    tensors = [torch.full((size,), float(size)) for size in range(4100, 4400)]
    wanted = [tensor.clone() for tensor in tensors]
    moved = Offloaded(tensors)
    moved.offload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    blocks = {host.untyped_storage().data_ptr(): host.untyped_storage().nbytes() for _, _, host in moved._pieces}
    assert len(blocks) < 4 and sum(blocks.values()) < 1.3 * sum(tensor.nbytes for tensor in wanted)
    moved.onload()
    assert all(map(torch.equal, tensors, wanted))


@given(SIZES, st.integers(1, 5 << 28))
def test_parts_of_an_optimizer_have_each_size_once_in_order_and_keep_to_the_limit_or_have_one(sizes, limit):
    parts = parts_of_sizes(sizes, limit)
    assert [n for part in parts for n in part] == list(range(len(sizes))) and all(parts)
    assert all(len(part) == 1 or sum(sizes[n] for n in part) <= limit for part in parts)
    # No two neighbours would go together, but for a part that is beyond the limit by itself.
    assert all(sum(sizes[n] for n in one) + sizes[other[0]] > limit for one, other in pairwise(parts))
