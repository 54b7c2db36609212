"""Changes to Megatron-Core, each with its reason."""

from typing import Any

import torch

from spmd_rl.patches.cpu_torch import host_torch
from spmd_rl.patches.patch import Patch

_VERSIONS = ">=0.16.1,<0.17"
_SOURCE = "https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core"


def _identity(original: Any) -> Any:
    def identity(value: Any, *args: Any, **options: Any) -> Any:
        return value

    return identity


def _type_of_cuda(original: Any) -> Any:
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(
            self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **options
        )

    return tensor_type


def _get_rng_state(original: Any) -> Any:
    return lambda *args, **options: torch.get_rng_state()


def _set_rng_state(original: Any) -> Any:
    return lambda state, *args, **options: torch.set_rng_state(state)


def _plain_function(original: Any) -> Any:
    """Megatron's `jit_fuser` decorator, doing nothing."""

    def decorate(function: Any) -> Any:
        return function

    return decorate


PATCHES = (
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="megatron.core.*:torch",
        platforms=("cpu",),
        reason="Megatron-Core asks torch.cuda for devices, streams and events, and a CPU build of torch has none",
        upstream=f"{_SOURCE}/distributed/param_and_grad_buffer.py",
        until="Megatron-Core asks torch.accelerator instead of torch.cuda",
        make=lambda original: host_torch(),
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="torch:Tensor.cuda",
        platforms=("cpu",),
        reason="Megatron-Core moves tensors with .cuda(), which raises in a CPU build of torch",
        upstream=f"{_SOURCE}/optimizer/clip_grads.py",
        until="Megatron-Core moves tensors with .to(device)",
        make=_identity,
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="torch:nn.Module.cuda",
        platforms=("cpu",),
        reason="Megatron-Core moves modules with .cuda(), which raises in a CPU build of torch",
        upstream=f"{_SOURCE}/models/common/vision_module/vision_module.py",
        until="Megatron-Core moves modules with .to(device)",
        make=_identity,
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="torch:Tensor.type",
        platforms=("cpu",),
        reason="Megatron-Core's optimizers compare tensor.type() with 'torch.cuda.FloatTensor' and refuse anything else",
        upstream=f"{_SOURCE}/optimizer/clip_grads.py#L167",
        until="Megatron-Core compares dtypes instead of type strings",
        make=_type_of_cuda,
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        platforms=("cpu",),
        reason="the random-state tracker reads a CUDA generator, and a CPU has only torch's own",
        upstream=f"{_SOURCE}/tensor_parallel/random.py#L47",
        until="the tracker takes the device of the platform",
        make=_get_rng_state,
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        platforms=("cpu",),
        reason="the random-state tracker writes a CUDA generator, and a CPU has only torch's own",
        upstream=f"{_SOURCE}/tensor_parallel/random.py#L77",
        until="the tracker takes the device of the platform",
        make=_set_rng_state,
    ),
    Patch(
        package="megatron-core",
        versions=_VERSIONS,
        target="megatron.core.jit:jit_fuser",
        platforms=("cpu", "npu"),
        reason="fused functions are compiled with torch.compile at their first call, minutes of C++ on a CPU and no backend on an NPU",
        upstream=f"{_SOURCE}/jit.py#L20",
        until="Megatron-Core lets a configuration turn the fuser off before its modules are imported",
        make=_plain_function,
    ),
)
