"""Leave out libraries that another library imports where they are there, for what nothing here uses."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("wandb", "opentelemetry")
"""Megatron-Core's inference engine writes metrics to the first, half a second of imports; vLLM's server traces requests
with the second, a fifth of one."""
NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""The variable of torch with which it compiles nothing."""
_COMPILER = ("torch._inductor.lowering",)
"""vLLM adds operators to a list in it; importing it, and what it imports, takes 0.8 s."""


def unused() -> tuple[str, ...]:
    """Return the libraries that are not needed in this environment."""
    return UNUSED + (_COMPILER if os.environ.get(NO_COMPILER) == "1" else ())


@contextmanager
def left_out(names: tuple[str, ...]) -> Iterator[None]:
    """Have modules look as if they were not installed inside, but for those that are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: their import fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
