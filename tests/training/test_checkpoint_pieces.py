"""A run of elements in the order of memory is a few boxes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.training.checkpoint_boxes import boxes

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_boxes_of_a_range_are_its_elements_in_order_and_each_is_contiguous(shape, data):
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    tensor = torch.arange(size).reshape(shape)
    found = []
    for offset, extent in boxes(shape, first, last):
        box = tensor[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        assert box.shape == extent and box.is_contiguous()
        found += box.flatten().tolist()
    assert found == list(range(first, last))


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_part_of_a_matrix_is_three_boxes_at_most(rows, columns, data):
    first = data.draw(st.integers(0, rows * columns))
    last = data.draw(st.integers(first, rows * columns))
    assert len(list(boxes((rows, columns), first, last))) <= 3
