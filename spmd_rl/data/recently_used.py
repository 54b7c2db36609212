"""Keep what was used last, within a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Hold values that can be made again; the newest one is kept however large it is."""

    def __init__(self, most_bytes: int, bytes_of: Callable[[Value], int]):
        self._most, self._bytes_of, self._bytes = most_bytes, bytes_of, 0
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key, made where it is not held."""
        if key not in self._kept:
            self._kept[key] = value = make()
            self._bytes += self._bytes_of(value)
            while len(self._kept) > 1 and self._bytes > self._most:
                self._bytes -= self._bytes_of(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(key)
        return self._kept[key]
