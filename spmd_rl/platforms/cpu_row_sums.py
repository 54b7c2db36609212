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

    def row_sums(matrix, sizes, table, column_weights, sums, every, first, last):
        """Write to `sums` [held] what checksum.py calls the checksums of boxes that share their columns, of some rows.

        `matrix`: integers. `sizes` [6]: how many they are, how many a row, the first of the boxes' columns, how many of
        those there are (each has one of the `column_weights`), n, and held. `table` [3, n]: of each row that can be
        read, where it is, its weight and the number of its box. The first `every` of them are read, and those from
        `first` to `last` (without).
        """
        size = carray(sizes, (6,))
        pitch, low, width = size[1], size[2], size[3]
        values, columns = carray(matrix, (size[0],)), carray(column_weights, (width,))
        rows = carray(table, (3, size[4]))
        for box in range(size[5]):
            sums[box] = 0
        for begin, end in ((0, every), (first, last)):
            for n in range(begin, end):
                at = rows[0, n] * pitch + low
                row = values[at : at + width]  # counted from 0, or the loop over it is not vectorised
                total = 0
                for c in range(len(row)):
                    total += np.int32(row[c] * columns[c])
                sums[rows[2, n]] += total * rows[1, n]

    element = {1: types.int8, 2: types.int16, 4: types.int32}[element_bytes]
    number, numbers = types.int64, types.CPointer(types.int64)
    pointers = types.CPointer(element), numbers, numbers, types.CPointer(types.int32), numbers
    made = cfunc(types.void(*pointers, number, number, number))(row_sums)
    # Called with plain integers for addresses too, which numba's own `made.ctypes` does not take.
    n, address = ctypes.c_int64, ctypes.c_void_p
    call = ctypes.CFUNCTYPE(None, *[address] * 5, n, n, n)(made.address)
    call.made = made  # whose machine code it is
    return call
