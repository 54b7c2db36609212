"""Which prompts are taken in which order: a function of the seed and of how many were taken before."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from spmd_rl.data.seeds import derived_seed

_BLOCK = 64


@dataclass(frozen=True)
class PromptOrder:
    """An endless order of the prompts of some sources; what is saved of it is how many prompts were taken."""

    sizes: tuple[int, ...]
    """Prompts of each source; they are numbered through, source after source."""
    seed: int
    shuffle: bool
    weights: tuple[float, ...] = (1.0,)
    """Each source's share of the prompts, up to a common factor."""

    def take(self, start: int, count: int) -> list[int]:
        """The `count` prompts after the first `start` ones.

        A number is position + round * (number of all prompts), where the source of the prompt is in its
        round-th epoch, from 0: the same prompt again has another number, and so other seeds.
        """
        total, offsets = sum(self.sizes), [0, *accumulate(self.sizes)]
        taken = []
        for source, nth in self._sources(start, count):
            epoch, place = divmod(nth, self.sizes[source])
            taken.append(offsets[source] + self._epoch(source, epoch)[place] + epoch * total)
        return taken

    def _sources(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source, how many of it were taken before) of each prompt."""
        if len(self.sizes) == 1:
            return [(0, nth) for nth in range(start, start + count)]
        shares = [Fraction(str(weight)) for weight in self.weights]
        # So long that no source's number of prompts can fall from one block's end to the next one's.
        length = max(_BLOCK, -(-sum(shares) // min(shares)))
        bounds = [bound / sum(shares) for bound in accumulate(shares, initial=Fraction(0))]
        drawn = []
        for block in range(start // length, (start + count - 1) // length + 1):
            first, last = (_counts(bounds, number * length) for number in (block, block + 1))
            parts = [
                # Spread evenly, then moved about at random where the order is random.
                ((k + 0.5) / (last[source] - first[source]), source, first[source] + k)
                for source in range(len(self.sizes))
                for k in range(last[source] - first[source])
            ]
            parts.sort()
            sources = [source for _, source, _ in parts]
            if self.shuffle:
                random.Random(derived_seed("mix", self.seed, block)).shuffle(sources)
            before = list(first)
            for position, source in enumerate(sources, block * length):
                if start <= position < start + count:
                    drawn.append((source, before[source]))
                before[source] += 1
        return drawn

    def _epoch(self, source: int, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.sizes[source])
        numbers = (self.seed, epoch) if source == 0 else (self.seed, epoch, source)
        return _shuffled(self.sizes[source], derived_seed("prompt order", *numbers))


def _counts(bounds: list[Fraction], taken: int) -> list[int]:
    """Split `taken` prompts over the sources: each one's share, rounded so that they add up."""
    ends = [int(bound * taken + Fraction(1, 2)) for bound in bounds]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


@functools.lru_cache(maxsize=16)
def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
