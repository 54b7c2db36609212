"""Measure how far the clocks of two nodes are apart."""

from spmd_rl.doctor.finding import Finding

# Logs of nodes are read side by side, and file servers and certificates compare times.
TOLERATED_SECONDS = 1.0


def offset(stamps: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(how many seconds this clock is ahead, how wrong that may be) from (asked, other's time, answered) stamps.

    The quickest exchange says it best: its error is at most half of its round trip.
    """
    asked, other, answered = min(stamps, key=lambda stamp: stamp[2] - stamp[0])
    return (asked + answered) / 2 - other, (answered - asked) / 2


def clock_findings(offsets: list[tuple[float, float]]) -> list[Finding]:
    """Of each node, from 1 on, against node 0."""
    found = []
    for node, (ahead, error) in enumerate(offsets, 1):
        if abs(ahead) - error > TOLERATED_SECONDS:
            word = "ahead of" if ahead > 0 else "behind"
            text = f"{abs(ahead):.2f} s {word} node 0"
            found.append(Finding("clock", text, "warn", "run chronyd or ntpd on every node", f"node {node}"))
    if not found and offsets:
        worst = max(abs(ahead) for ahead, _ in offsets)
        error = max(error for _, error in offsets)
        found.append(Finding("clock", f"within {worst * 1e3:.1f} ms of node 0 (known to {error * 1e3:.1f} ms)", "ok"))
    return found
