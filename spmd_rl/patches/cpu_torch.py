"""A `torch` for Megatron-Core's modules on a CPU: the same module, whose `cuda` names the host.

Megatron-Core asks `torch.cuda` for streams, events, memory and the current device in hundreds of places. Only its own
modules see this object under the name `torch`; everybody else in the process keeps the real one.
"""

import contextlib
import functools
import types
from typing import Any

import torch

_HOST = torch.device("cpu")
_FACTORIES = frozenset(
    "tensor empty zeros ones full arange rand randn randint randperm eye linspace as_tensor empty_like zeros_like "
    "ones_like full_like rand_like randn_like empty_strided Generator".split()
)
_TENSOR_TYPES = frozenset(
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)


class _Event:
    """Work on a host is finished when the call returns: recording and waiting have nothing to do."""

    def __init__(self, *args: Any, **options: Any):
        self.recorded = False

    def record(self, *args: Any) -> None:
        self.recorded = True

    def wait(self, *args: Any) -> None:
        assert self.recorded

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


class _Stream:
    """The only stream of a host."""

    def __init__(self, *args: Any, **options: Any):
        self.device = _HOST

    def wait_stream(self, other: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


_STREAM = _Stream()


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _cuda() -> types.ModuleType:
    """Stands in for `torch.cuda` on a CPU, as far as Megatron-Core uses it."""
    cuda = types.ModuleType("torch.cuda")
    random = types.ModuleType("torch.cuda.random")
    random.get_rng_state = cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    random.set_rng_state = cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda.random = random
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed
    cuda.is_available = lambda: False
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: _HOST
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *args: 0
    cuda.memory_reserved = cuda.max_memory_reserved = lambda *args: 0
    cuda.memory_stats = lambda *args: {}
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "check_error", "init"):
        setattr(cuda, name, _nothing)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **options: _STREAM
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.OutOfMemoryError = torch.OutOfMemoryError
    cuda.amp = torch.cuda.amp
    cuda.nvtx = types.ModuleType("torch.cuda.nvtx")
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    for name in _TENSOR_TYPES:
        setattr(cuda, name, getattr(torch, name))
    return cuda


def _on_host(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return _HOST
    return value


def _host_factory(factory: Any) -> Any:
    """The factory, with every `cuda` device it is given read as the host."""
    if isinstance(factory, type):
        return lambda device="cpu": factory(_on_host(device))

    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _on_host(options["device"])
        return factory(*args, **options)

    return make


class HostTorch(types.ModuleType):
    """`torch`, whose `cuda` is the host; every other name is the real one."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _cuda()
        for name in _FACTORIES:
            setattr(self, name, _host_factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def host_torch() -> HostTorch:
    return HostTorch()
