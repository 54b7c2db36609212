"""Lists of values as messages say them."""

from collections.abc import Iterable
from typing import Any


def words(values: Iterable[float]) -> str:
    """As the command line takes a list."""
    return " ".join(map(str, values))


def divisors(number: int) -> str:
    return either(n for n in range(1, number + 1) if number % n == 0)


def either(values: Iterable[Any]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
