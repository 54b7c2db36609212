"""A run of a tensor's elements, in the order of memory, as boxes of the tensor."""

import math
from collections.abc import Iterator, Sequence


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [first, last) of a tensor in the order of memory, as boxes: (offset, shape) of each, in order."""
    if first >= last:
        return
    if len(shape) == 1:
        yield (first,), (last - first,)
        return
    row = math.prod(shape[1:])
    while first < last:
        number, inside = divmod(first, row)
        whole = (last - first) // row
        if inside == 0 and whole:
            yield (number, *(0 for _ in shape[1:])), (whole, *shape[1:])
            first += whole * row
            continue
        end = min(last, (number + 1) * row)
        for offset, size in boxes(shape[1:], inside, end - number * row):
            yield (number, *offset), (1, *size)
        first = end
