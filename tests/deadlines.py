"""Deadlines on machines that are shared: they grow with what a known amount of work takes there."""

import os
import time


def slowdown(seconds: float = 0.1) -> float:
    """Return how many times as long as on a machine of one's own so many seconds of work take now; at least 1."""
    started, worked = time.monotonic(), time.thread_time()
    while time.thread_time() - worked < seconds:
        pass
    return max(1.0, (time.monotonic() - started) / seconds)


def crowding() -> float:
    """Return how many processes there were for each processor within the last minute; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
