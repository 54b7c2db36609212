"""Hold this process' status: step, phase, verb, and the part of it. The watchdog and fault injection read it here."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spmd_rl.config.names import Phase

WAITS = "waits for "
"""Begins the `doing` of a rank that only waits for others at the control group."""
IDLE = "waits for a person"


@dataclass(frozen=True)
class RankStatus:
    """A rank's place in the run."""

    step: int = 0
    """Counted from 1, as rank 0 tells it; 0 before the first."""
    phase: str = Phase.START
    """The name of its time in the metrics: timing/<phase>."""
    verb: str = ""
    """Empty between two verbs."""
    doing: str = ""
    """Its part of the verb: a bucket, a request, a sample, whom it waits for."""
    since: float = field(default_factory=time.monotonic)
    """time.monotonic() when it came here."""


StatusListener = Callable[[RankStatus], None]

_status = RankStatus()
_listeners: list[StatusListener] = []


def current_status() -> RankStatus:
    """Return this rank's status."""
    return _status


def set_status(**changes: Any) -> None:
    """Set the fields of this rank's status that change. The listeners hear of it, on this thread; they may raise."""
    global _status
    _status = replace(_status, since=time.monotonic(), **changes)
    for listener in _listeners:
        listener(_status)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Have this rank be at a part of its verb inside."""
    before = _status.doing
    set_status(doing=what)
    try:
        yield
    finally:
        set_status(doing=before)


def on_status_change(listener: StatusListener, first: bool = False) -> None:
    """Hear of every move from now on; `first`: before the others, of which one may end or stop this process."""
    _listeners.insert(0, listener) if first else _listeners.append(listener)
