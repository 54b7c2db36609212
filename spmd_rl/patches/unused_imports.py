"""Leave out libraries that another library imports where they are there, for what nothing here uses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MEGATRON_CORE = ("wandb",)
"""Megatron-Core's inference engine writes metrics to it; importing it takes half a second."""


@contextmanager
def left_out(names: tuple[str, ...] = MEGATRON_CORE) -> Iterator[None]:
    """Have modules look as if they were not installed inside, but for those that are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: their import fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
