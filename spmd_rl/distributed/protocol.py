"""Combine the answers to a verb on their way to rank 0, so that it gets one whatever the world."""

from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple, Protocol, Self

import msgspec


class Answer(Protocol):
    """Stand for what a rank answers to a verb."""

    def combine(self, other: Self) -> Self:
        """Return the answer of both; `other` is of the higher ranks."""


class Combined(NamedTuple):
    """State what a rank answers, and how two answers become one; the first is of the lower ranks.

    What comes out must not depend on where the tree of ranks parts them: whole numbers, most and least, all and any,
    lists one after the other. Floats whose sum matters come as lists, and rank 0 adds them up in the order of ranks.
    """

    type: Any
    combine: Callable[[Any, Any], Any]

    def encoded(self, value: Any) -> msgspec.Raw:
        """Return one rank's answer as it travels."""
        return msgspec.Raw(msgspec.msgpack.encode(value))

    def decoded(self, answer: msgspec.Raw) -> Any:
        """Return an answer that came."""
        return msgspec.msgpack.decode(answer, type=self.type)


class Gathered(Combined):
    """Answer with a list: what each rank answers, in the order of ranks."""

    def encoded(self, value: Any) -> msgspec.Raw:
        return super().encoded([value])


GATHERED = Gathered(list[Any], add)
