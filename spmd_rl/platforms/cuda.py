"""NVIDIA GPUs over NCCL."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from glob import glob
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING

from spmd_rl.platforms.attention_layout import Attend, AttentionLayout
from spmd_rl.platforms.kernels import Kernels
from spmd_rl.platforms.platform import Platform, lazily, torch_add_product

if TYPE_CHECKING:
    import torch

    from spmd_rl.models.model_shape import ModelShape
    from spmd_rl.platforms.grouped_matmul import ExpertCounts

# What torch's flash attention is compiled for.
_FLASH_HEAD_DIM, _FLASH_CAPABILITY = 256, (8, 0)


def _missing() -> str:
    # torch is imported only where there is something to ask it about.
    if not (glob("/dev/nvidia[0-9]*") or glob("/dev/dxg")):
        return "there is no GPU (/dev/nvidia0, ...); use run.platform = auto"
    import torch

    if torch.cuda.is_available():
        return ""
    return "torch sees no GPU; use run.platform = auto, or install the cuda requirements"


def _used_bytes() -> int:
    """Return what is taken of the device: also by NCCL and vLLM's pools, which torch's allocator doesn't know."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def _peak_bytes() -> int:
    """Return the most that torch's allocator held, or what is taken now, where that is more."""
    import torch

    return max(_used_bytes(), torch.cuda.max_memory_reserved())


def _prepare_attention(layout: AttentionLayout) -> Attend:
    """Make one call for all sequences; what flash attention has no kernel for goes through torch's general one."""
    from spmd_rl.platforms.sdpa_attention import prepare_sdpa

    kernels = {True: cache(lambda: _prepare_flash(layout)), False: cache(lambda: prepare_sdpa(layout))}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        return kernels[not _no_flash(query.dtype.itemsize, query.shape[-1])]()(query, key, value, scale)

    return attend


def _no_flash(itemsize: int, head_dim: int) -> str:
    """Return why flash attention over variable lengths can't be used; nothing where it can."""
    if itemsize != 2:
        return "it computes in half precision only"
    if head_dim > _FLASH_HEAD_DIM:
        return f"it takes heads of up to {_FLASH_HEAD_DIM} values, and these have {head_dim}"
    return _flash_is_missing()


@cache
def _flash_is_missing() -> str:
    """Return why this torch has no flash attention as it is called here, or no kernels of it for this GPU."""
    import torch

    takes = set[str]()
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention import varlen

        takes = set(signature(varlen.varlen_attn).parameters)
    if not takes >= {"scale", "window_size", "enable_gqa"}:
        return f"torch {torch.__version__} has no varlen_attn with grouped heads and windows, which torch 2.12 has"
    found = torch.cuda.get_device_capability()
    if found < _FLASH_CAPABILITY:
        return f"it needs compute capability {_version(_FLASH_CAPABILITY)}, and this GPU has {_version(found)}"
    return ""


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _no_grouped(dtype: torch.dtype, sizes: Sequence[int], device: torch.device) -> str:
    """Return why torch's product for all experts can't be used; nothing where it can. `sizes`: of a weight's rows."""
    import torch
    import torch.nn.functional as F

    if dtype != torch.bfloat16:
        return "it is for bfloat16"
    if any(size * dtype.itemsize % 16 for size in sizes):
        return f"rows have to be multiples of 16 bytes, and these have {' and '.join(map(str, sizes))} values"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm, which torch 2.13 has"
    return "" if _has_kernels(device) else f"it needs compute capability {_version(_FLASH_CAPABILITY)}"


@cache
def _has_kernels(device: torch.device) -> bool:
    """Return whether torch's grouped product runs there: on a GPU since Ampere, and on the host, as in tests."""
    import torch

    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def _slower_paths(shape: ModelShape, dtype: str) -> list[str]:
    """Say which kernels training goes without."""
    import torch

    number, said = getattr(torch, dtype), []
    head_dim = shape.head_dim if shape.mla is None else shape.mla.nope_dim + shape.mla.rope_dim
    if why := _no_flash(number.itemsize, head_dim):
        said.append(f"training's attention goes through torch's general kernel, not flash attention: {why}")
    if shape.experts is not None:
        # Both matrices of an expert on one of its ranks; cut over more, the second has fewer columns.
        if why := _no_grouped(number, (shape.hidden, shape.experts.ffn), torch.device("cuda")):
            said.append(f"training multiplies expert by expert, not all at once: {why}")
    return said


def _prepare_flash(layout: AttentionLayout) -> Attend:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    rows = layout.rows()
    ends = [[0, *layout.query_ends], [0, *layout.key_ends]]
    cumulative = [torch.tensor(part, dtype=torch.int32, device=layout.device) for part in ends]
    longest = [max(end - start for start, end in pairwise(part)) for part in ends]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        return varlen_attn(
            query,
            key,
            value,
            *cumulative,
            *longest,
            scale=scale,
            # Causal; flash attention aligns it at the bottom right.
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    return attend


def _grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: ExpertCounts) -> torch.Tensor:
    """Multiply with one kernel for all experts, which reads on the device where each one's tokens end.

    It is for bfloat16, and for rows that are multiples of 16 bytes; others are multiplied expert by expert.
    """
    import torch
    import torch.nn.functional as F

    from spmd_rl.platforms.grouped_matmul import GroupedKernels, looped_matmul

    def product(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, y, offs=counts.cumsum(0, dtype=torch.int32))

    if not len(x) or _no_grouped(x.dtype, weight.shape[1:], x.device):
        return looped_matmul(x, weight, counts)
    return GroupedKernels(product, product)(x, weight, counts.on_device)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a product of half-precision numbers that is summed in float32; float32 ones as they are."""
    import torch

    if b.dtype == torch.float32:
        torch_add_product(total, a, b)
    else:
        total.add_(torch.mm(a.to(b.dtype), b, out_dtype=torch.float32))


CUDA = Platform(
    name="cuda",
    device_type="cuda",
    backend="cpu:gloo,cuda:nccl",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Megatron-Core's sequence parallel overlap counts on one hardware queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    },
    missing=_missing,
    claim=lazily("torch.cuda:set_device"),
    attention=_prepare_attention,
    grouped_matmul=_grouped_matmul,
    add_product=_add_product,
    slower_paths=_slower_paths,
    fused_adamw=True,
    memory_bytes=_used_bytes,
    peak_memory_bytes=_peak_bytes,
    free_and_total_bytes=lazily("torch.cuda:mem_get_info"),
    reset_peak_memory=lazily("torch.cuda:reset_peak_memory_stats"),
    give_back_memory=lazily("torch.cuda:empty_cache"),
    # A context takes 0.5 GiB, cuBLAS, flash attention and vLLM's graphs 1.5, NCCL's channels 1.
    kernels=Kernels(libraries=3 << 30),
    bucket_bytes=256 << 20,
    link_probe_bytes=64 << 20,
    socket_variables=("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    device_count=lazily("torch.cuda:device_count"),
    synchronize=lazily("torch.cuda:synchronize"),
    # What cuBLAS needs to give the same bits: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    deterministic_environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    # Of its backends for experts, those of FlashInfer, which Blackwell gets by default, shuffle the weights that a
    # refresh writes.
    engine_options={"enable_sleep_mode": True, "moe_backend": "triton"},
)
