"""Let a check say what it found."""

import sys
from collections.abc import Callable

from spmd_rl.platforms import current
from spmd_rl.platforms.platform import Platform

NOT_HERE = "not here"
_failed: list[str] = []


def device_here(local_rank: int = 0) -> Platform:
    """Make this rank's device current and return its machine."""
    machine = current()
    machine.set_environment()
    machine.claim(local_rank)
    return machine


def expect(name: str, holds: bool, found: object = "") -> None:
    """Print pass, or what was found."""
    line = f"pass {name}" if holds else f"FAIL {name}: {found}"
    print(line + "\n", end="", flush=True)  # one write: ranks share the screen
    if not holds:
        _failed.append(name)


def attempt(name: str, act: Callable[[], object]) -> None:
    """Print pass where something can be done at all, and what it returns."""
    try:
        found = act()
    except Exception as error:  # whatever a library raises is the finding
        expect(name, False, f"{type(error).__name__}: {error}")
    else:
        expect(name if found is None else f"{name}: {found}", True)


def not_here(what: str) -> None:
    """End a check that asks for what this machine does not have."""
    print(f"{NOT_HERE}: {what}", flush=True)
    leave()


def leave() -> None:
    """End with the status that the checks came to."""
    sys.exit(int(bool(_failed)))
