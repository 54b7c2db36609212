"""Names of ranks for people to read."""

from collections.abc import Iterable


def ranks_named(ranks: Iterable[int]) -> str:
    """rank 3; ranks 0-2, 5."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {words}" if len(numbers) == 1 else f"ranks {words}"
