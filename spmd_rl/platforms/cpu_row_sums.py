"""The loop behind checksums of what lies in a CPU's memory: compiled, because what costs otherwise are the calls.

A model has hundreds of parameters and a check looks at few rows of each: a dozen calls for each parameter, as arrays
need, take longer than its bytes.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np


@lru_cache
def compiled(element_bytes: int) -> Callable[..., None]:
    """Return the loop for elements of 1, 2 or 4 bytes. It takes numbers and addresses, and trusts them.

    The first use in a process imports numba and compiles, together in about half a second. No cache on disk: it would
    save half of that, and needs a directory that every rank may write to.
    """
    from numba import carray, cfunc, types

    def row_sums(
        matrix, elements, pitch, low, width, rows, row_weights, boxes, column_weights, held, sums, every, first, last
    ):  # fmt: skip
        """Write to `sums` [held] what checksum.py calls the checksums of boxes that share their columns, of some rows.

        `matrix`: `elements` integers, `pitch` a row; the boxes' columns are the `width` from `low` on, and have the
        `column_weights`. `rows`, `row_weights`, `boxes`: of each row that can be read, where it is, its weight and the
        number of its box. The first `every` of them are read, and those from `first` to `last` (without).
        """
        values, columns = carray(matrix, (elements,)), carray(column_weights, (width,))
        for box in range(held):
            sums[box] = 0
        for begin, end in ((0, every), (first, last)):
            for n in range(begin, end):
                at = rows[n] * pitch + low
                row = values[at : at + width]  # counted from 0, or the loop over it is not vectorised
                total = 0
                for c in range(len(row)):
                    total += np.int32(row[c] * columns[c])
                sums[boxes[n]] += total * row_weights[n]

    element = {1: types.int8, 2: types.int16, 4: types.int32}[element_bytes]
    number, numbers = types.int64, types.CPointer(types.int64)
    columns = number, number, number, number, numbers, numbers, numbers, types.CPointer(types.int32)
    made = cfunc(types.void(types.CPointer(element), *columns, number, numbers, number, number, number))(row_sums)
    # Called with plain integers for addresses too, which numba's own `made.ctypes` does not take.
    n, address = ctypes.c_int64, ctypes.c_void_p
    call = ctypes.CFUNCTYPE(None, address, n, n, n, n, *[address] * 4, n, address, n, n, n)(made.address)
    call.made = made  # whose machine code it is
    return call
