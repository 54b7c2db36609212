"""Leave out, on a CPU, what libraries write or compute and nothing reads."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Protocol

import torch


class _Unfilled(ModuleType):
    """`torch`, whose zeros are not written; every other name is the one it had."""

    def __init__(self, known: ModuleType) -> None:
        super().__init__("torch")
        self._known, self.zeros = known, known.empty

    def __getattr__(self, name: str) -> object:
        return getattr(self._known, name)


def allocate_unfilled(original: FunctionType) -> Callable[..., object]:
    """Have a function of a library fill nothing that it allocates."""

    @functools.wraps(original)
    def allocate(*args: object, **options: object) -> object:
        names = original.__globals__
        known = names["torch"]
        names["torch"] = _Unfilled(known)
        try:
            return original(*args, **options)
        finally:
            names["torch"] = known

    return allocate


class _Buffer(Protocol):
    """Stand for Megatron's buffer of parameters and gradients."""

    param_data: torch.Tensor | None
    param_index_map: Mapping[torch.nn.Parameter, tuple[int, int, int]]
    """Parameter -> its first value in the buffer, the one behind its last, its bucket."""


def allocate_buffers_unfilled(original: FunctionType) -> Callable[..., None]:
    """Have a buffer of parameters and gradients fill what lies between the parameters alone.

    The parameters hold nothing yet: their memory goes, and what is copied from them is one element.
    """
    allocate = allocate_unfilled(original)

    @functools.wraps(original)
    def __init__(
        self: _Buffer,
        ddp_config: object,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params: Sequence[torch.nn.Parameter],
        *args: object,
        **options: object,
    ) -> None:
        for one in params:
            one.data = torch.empty_strided(one.shape, (0,) * one.dim(), dtype=one.dtype, device=one.device)
        allocate(self, ddp_config, param_dtype, grad_dtype, params, *args, **options)
        if self.param_data is None:
            return
        ends = 0
        for start, end, _ in sorted(self.param_index_map.values()):
            self.param_data[ends:start].zero_()
            ends = end
        self.param_data[ends:].zero_()

    return __init__


def fill_buffers_alone(original: Callable[..., None]) -> Callable[..., None]:
    """Leave parameters as they are allocated, but for those with a value of their own that stands for a real one."""

    def initialize(tensor: torch.Tensor, *args: object, **options: object) -> None:
        if not isinstance(tensor, torch.nn.Parameter) or getattr(tensor, "dummy_weight_value", None) is not None:
            original(tensor, *args, **options)

    return initialize


def count_no_ranks(original: object) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return 0 for the rank of each token among all by its log-probability."""

    def count(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(values), dtype=torch.int64)

    return count


def log_where_it_is_read(original: Callable[[object], None]) -> Callable[[object], None]:
    """Have a function of vLLM that only logs do so where its logger takes it."""

    @functools.wraps(original)
    def log(args: object) -> None:
        if logging.getLogger("vllm").isEnabledFor(logging.INFO):
            original(args)

    return log
