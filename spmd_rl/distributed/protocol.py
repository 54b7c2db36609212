"""How the answers to a verb are combined on their way to rank 0, so that it gets one whatever the world.

Only what comes out the same in whatever order of ranks is combined: whole numbers, most and least, all and any. Sums of
floats are not: rank 0 adds them up in the order of ranks.
"""

from collections.abc import Callable, Mapping
from operator import add
from typing import Any, NamedTuple, Self

import msgspec

from spmd_rl.config.names import Verb


class Refreshed(msgspec.Struct):
    """Answer `to_rollout`: bytes that came to a rank, of the rank with most."""

    network_bytes: int
    local_bytes: int

    def combine(self, other: Self) -> "Refreshed":
        return Refreshed(
            max(self.network_bytes, other.network_bytes),
            max(self.local_bytes, other.local_bytes),
        )


class Exchanged(msgspec.Struct):
    """Answer `exchange`: bytes that a rank sent, of the rank with most, and tokens that all ranks laid down."""

    network_bytes: int
    tokens: int
    padding_tokens: int
    ranks: int = 1
    most_tokens: int = 0
    """Of the rank with most."""

    def __post_init__(self) -> None:
        self.most_tokens = max(self.tokens, self.most_tokens) if self.ranks == 1 else self.most_tokens

    def combine(self, other: Self) -> "Exchanged":
        return Exchanged(
            max(self.network_bytes, other.network_bytes),
            self.tokens + other.tokens,
            self.padding_tokens + other.padding_tokens,
            self.ranks + other.ranks,
            max(self.most_tokens, other.most_tokens),
        )


class Progress(msgspec.Struct):
    """Answer `checkpoint_progress`."""

    written: bool
    """By all."""
    failed: str | None
    """Why, on the first rank on which it did."""
    asked: bool
    """Of any rank, to save and end."""

    def combine(self, other: Self) -> "Progress":
        return Progress(
            self.written and other.written,
            self.failed or other.failed,
            self.asked or other.asked,
        )


class Combined(NamedTuple):
    """State what a rank answers, and how two answers become one; the first is of the lower ranks."""

    type: Any
    combine: Callable[[Any, Any], Any]


def _first(one: Any, other: Any) -> Any:
    return one


_SILENT = (
    *(Verb.PUT, Verb.KEEP_REWARDS, Verb.WRITE_CONVERSATIONS, Verb.FORGET),
    *(Verb.EXPORT_HF, Verb.BEGIN_CHECKPOINT, Verb.LOAD, Verb.STOP),
)
"""They have no answer."""
COMBINED: Mapping[str, Combined] = {
    **dict.fromkeys(_SILENT, Combined(None, _first)),
    Verb.TO_ROLLOUT: Combined(Refreshed, Refreshed.combine),
    Verb.TO_TRAINING: Combined(float | None, _first),
    Verb.EXCHANGE: Combined(Exchanged, Exchanged.combine),
    Verb.CHECKPOINT_BYTES: Combined(int, add),
    Verb.CHECKPOINT_PROGRESS: Combined(Progress, Progress.combine),
    Verb.REPLY: Combined(str, _first),
}
"""Of each verb whose answers become one. Those of the others come to rank 0 in the order of ranks."""
