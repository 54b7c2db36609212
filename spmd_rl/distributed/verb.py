"""The mark of a collective act."""

from collections.abc import Callable
from typing import TypeVar

Method = TypeVar("Method", bound=Callable)


def verb(method: Method) -> Method:
    """Marks a collective act: a method of Ranks (rank 0 tells it) and of Worker (every rank does it)."""
    method.is_verb = True
    return method
