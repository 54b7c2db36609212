"""Which packed tokens attend to which: what the attention of every platform is told about a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Attend = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], "torch.Tensor"]
"""(query [T, heads, d], key [T, kv heads, d], value [T, kv heads, d], scale) -> [T, heads, d]."""


class QuerySequence(NamedTuple):
    """Packed tokens `start` to `end`, which see a prompt that they continue, and their own past."""

    start: int
    end: int
    prompt: slice = slice(0, 0)
    """The packed tokens of the prompt; none for a sequence that has it inside."""

    @property
    def keys(self) -> int:
        """Number of the tokens that the last one sees."""
        return self.prompt.stop - self.prompt.start + self.end - self.start


@dataclass(frozen=True)
class AttentionLayout:
    """The sequences of T packed tokens, one after another without a gap.

    The queries of a sequence are the last of its keys, so it is causal when aligned at the bottom right. That is what
    the kernels for variable lengths compute, from gathered keys and the cumulative lengths of both.
    """

    sequences: tuple[QuerySequence, ...]
    device: torch.device

    @property
    def query_ends(self) -> list[int]:
        """Ends of the sequences in the queries; the last is T."""
        return [sequence.end for sequence in self.sequences]

    @property
    def key_ends(self) -> list[int]:
        """Ends of the sequences in the gathered keys; the last is K."""
        return list(accumulate(sequence.keys for sequence in self.sequences))

    def rows(self) -> torch.Tensor | None:
        """Return the packed token of each gathered key [K]; None where the keys are the tokens as they lie."""
        import torch

        if not any(sequence.prompt.stop for sequence in self.sequences):
            return None
        parts = [
            torch.arange(*ends)
            for sequence in self.sequences
            for ends in ((sequence.prompt.start, sequence.prompt.stop), (sequence.start, sequence.end))
        ]
        return torch.cat(parts).to(self.device)
