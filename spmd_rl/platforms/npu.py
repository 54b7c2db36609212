"""Ascend NPUs over HCCL (torch_npu, vllm-ascend)."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from glob import glob
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from spmd_rl.platforms.attention_layout import Attend, AttentionLayout
from spmd_rl.platforms.kernels import Kernels
from spmd_rl.platforms.platform import (
    Platform,
    Profile,
    RefusedVariable,
    lazily,
    torch_rotate,
)

if TYPE_CHECKING:
    import torch

    from spmd_rl.models.model_shape import ModelShape
    from spmd_rl.platforms.grouped_matmul import ExpertCounts

# The fused attention takes at most so many sequences in a call.
_SEQUENCES = 1000
# The fused rotation takes fewer values of a head.
_ROTATED = 896
# The fused product of experts takes at most so many of them.
_GROUPS = 1024


# A capability that Megatron-Core may ask for; earlier versions of torch_npu do not read the variable.
_READS_CAPABILITY = "2.9.0.post2"


_LEAST_BUFFER_MIB = 128


def _missing() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; bash launch/setup_env.sh npu, or run.platform = auto"
    if not glob("/dev/davinci[0-9]*"):
        return "there is no die (/dev/davinci0, ...): a login node, or a container without its devices?"
    return ""


def _custom_operators() -> None:
    """Let CANN find vllm-ascend's own operators: it looks for them once, when the device is touched."""
    found = importlib.util.find_spec("vllm_ascend")
    for place in found.submodule_search_locations or () if found is not None else ():
        vendors = Path(place) / "_cann_ops_custom" / "vendors"
        here = [str(path) for path in sorted(vendors.glob("*")) if path.is_dir()]
        before = os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":")
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = ":".join(dict.fromkeys(filter(None, [*here, *before])))


def _environment() -> dict[str, str]:
    """Return what torch_npu of this version reads."""
    try:
        installed = Version(metadata.version("torch_npu"))
    except metadata.PackageNotFoundError:
        return {}
    return {"TORCH_NPU_DEVICE_CAPABILITY": "8.0"} if installed >= Version(_READS_CAPABILITY) else {}


def _profiler(shapes: bool, stacks: bool, memory: bool) -> Profile:
    """Return torch_npu's profiler, of the host and of the die."""
    from torch_npu.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.NPU]
    return profile(activities=activities, record_shapes=shapes, with_stack=stacks, profile_memory=memory)


def _model_environment(shape: ModelShape, tensor: int, expert: int, max_sequences: int) -> dict[str, str]:
    """Return the MiB of HCCL's buffers: for experts, what its dispatch and combine kernels (MC2) need.

    The formula is in https://github.com/vllm-project/vllm-ascend/issues/5287; with less, they fail while they run.
    """
    if shape.experts is None:
        return {"HCCL_BUFFSIZE": str(_LEAST_BUFFER_MIB)}

    def aligned(size: int, to: int) -> int:
        return -(-size // to) * to

    tokens, row = -(-max_sequences // tensor), 2 * shape.hidden
    local = -(-shape.experts.count // expert)
    dispatched = tokens * aligned(aligned(row, 32) + 64, 512) * expert * local
    combined = tokens * aligned(row, 512) * shape.experts.per_token
    return {"HCCL_BUFFSIZE": str(max(_LEAST_BUFFER_MIB, -(-2 * (dispatched + combined) // 2**20)))}


def _used_bytes() -> int:
    """Return what is taken of the device: also by CANN, HCCL and vLLM's pools, which torch's allocator doesn't know."""
    import torch

    free, total = torch.npu.mem_get_info()
    return total - free


def _peak_bytes() -> int:
    """Return the most that torch's allocator held, or what is taken now, where that is more."""
    import torch

    return max(_used_bytes(), torch.npu.max_memory_reserved())


def _expandable_segments(on: bool) -> None:
    """Let torch's allocator grow its segments; vllm-ascend's pools, which sleep, can't be made while it may."""
    import torch

    torch.npu.memory._set_allocator_settings(f"expandable_segments:{on}")


def _claim(local_rank: int) -> None:
    """Make the die current, then let Megatron-Core's `torch.cuda` mean `torch.npu`.

    The order is the vendor's: the device is touched before `megatron.core` is imported, because Megatron binds
    `torch.cuda._lazy_init` at import and that call only returns early once the device is initialised.
    """
    _custom_operators()
    import torch
    import torch_npu  # noqa: F401  (registers the device)

    torch.npu.set_device(local_rank)
    torch.npu.synchronize()
    from torch_npu.contrib import transfer_to_npu  # noqa: F401  (redirects torch.cuda for Megatron-Core)

    # Storages in the FRACTAL_NZ layout cannot be written in place by a refresh.
    torch.npu.config.allow_internal_format = False
    if not torch.cuda.default_generators:
        torch.cuda.default_generators = torch.npu.default_generators


def _device_count() -> int:
    import torch

    # torch loads torch_npu by itself where it is installed.
    return torch.npu.device_count() if hasattr(torch, "npu") else 0


def _restore_events() -> None:
    """vllm-ascend leaves a placeholder in `torch.cuda.Event`; Megatron's timers need the real one's `elapsed_time`."""
    import torch

    torch.cuda.Event = torch.npu.Event


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """Return the causal mask in the compressed size that sparse_mode 3 takes; True is masked."""
    import torch

    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)


def _prepare_attention(layout: AttentionLayout) -> Attend:
    """Make one call of the fused kernel for all sequences, which lie one after another (TND).

    The ends of the sequences are lists on the host, without a leading 0. sparse_mode 3 is causal when aligned at the
    last token of a sequence's queries and keys.
    """
    import torch
    import torch_npu

    rows = layout.rows()
    query_ends, key_ends = layout.query_ends, layout.key_ends
    cuts = [*range(0, len(query_ends), _SEQUENCES), len(query_ends)]

    def part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, some: slice) -> torch.Tensor:
        (q, queries), (k, keys) = (_part(ends, some) for ends in (query_ends, key_ends))
        return torch_npu.npu_fusion_attention(
            query[q],
            key[k],
            value[k],
            query.shape[1],
            "TND",
            atten_mask=_causal_mask(query.device),
            scale=scale,
            actual_seq_qlen=queries,
            actual_seq_kvlen=keys,
            sparse_mode=3,
        )[0]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        outs = [part(query, key, value, scale, slice(*some)) for some in pairwise(cuts)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return attend


def _part(ends: list[int], some: slice) -> tuple[slice, list[int]]:
    """Return the tokens of some of the sequences, and where these end among them."""
    start = ends[some.start - 1] if some.start else 0
    return slice(start, ends[some.stop - 1]), [end - start for end in ends[some]]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the fused norm over the last dimension."""
    import torch_npu

    return torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]


def _grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: ExpertCounts) -> torch.Tensor:
    """Multiply with one kernel for all experts; what it has no form for goes expert by expert.

    group_type says what is split among the experts: 0 the rows of the product, 2 what is summed over; group_list_type 1
    that the list has counts.
    """
    import torch_npu

    from spmd_rl.platforms.grouped_matmul import GroupedKernels, looped_matmul

    def product(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        split = {"split_item": 2, "group_type": 0} if y.dim() == 3 else {"split_item": 3, "group_type": 2}
        (out,) = torch_npu.npu_grouped_matmul([x], [y], group_list=counts, group_list_type=1, **split)
        return out

    if not len(x) or len(weight) > _GROUPS:
        return looped_matmul(x, weight, counts)
    return GroupedKernels(product, product)(x, weight, counts.on_device)


def _slower_paths(shape: ModelShape, dtype: str) -> list[str]:
    """Say which kernels training goes without."""
    said, experts = [], shape.experts.count if shape.experts is not None else 0
    turned = shape.head_dim if shape.mla is None else shape.mla.rope_dim
    if turned >= _ROTATED:
        said.append(
            f"training turns queries and keys step by step: the kernel is for less than {_ROTATED} values of a head"
        )
    if experts > _GROUPS:
        said.append(
            f"training multiplies expert by expert where a rank has more than {_GROUPS}, which the kernel takes at once"
        )
    return said


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn the halves with one kernel, for an even number of values below 896."""
    import torch_npu

    if x.shape[-1] >= _ROTATED:
        return torch_rotate(x, cosines, sines)
    return torch_npu.npu_rotary_mul(*(part.contiguous()[None] for part in (x, cosines, sines)))[0]


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return the fused gate, which takes contiguous tensors that are not empty."""
    import torch_npu

    if not x.numel():
        gate, up = x.chunk(2, dim=-1)
        return gate * up
    return torch_npu.npu_swiglu(x.contiguous(), dim=-1)


def _weighted_swiglu(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the fused gate times the weights of the experts."""
    return (_swiglu(x) * probs[:, None]).to(x.dtype)


NPU = Platform(
    name="npu",
    device_type="npu",
    backend="cpu:gloo,npu:hccl",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "TASK_QUEUE_ENABLE": "1",
        # Seconds. CONNECT: nodes start at different times, most of all when each reads its weights first. EXEC: for the
        # slowest rank, longer than run.collective_timeout_seconds, whose message says more. EVENT must be above EXEC.
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "7200",
        "HCCL_EVENT_TIMEOUT": "7260",
        "TOKENIZERS_PARALLELISM": "false",
    },
    missing=_missing,
    claim=_claim,
    attention=_prepare_attention,
    rms_norm=_rms_norm,
    grouped_matmul=_grouped_matmul,
    swiglu=_swiglu,
    slower_paths=_slower_paths,
    weighted_swiglu=_weighted_swiglu,
    rotate=_rotate,
    fused_adamw=True,
    more_environment=_environment,
    model_environment=_model_environment,
    refused_environment={
        "PYTORCH_NPU_ALLOC_CONF": RefusedVariable(
            ("expandable_segments:True",),
            "vLLM's sleep mode refuses it where it makes its memory",
            "unset PYTORCH_NPU_ALLOC_CONF, or leave expandable_segments:True out: training switches it on by itself",
        ),
        "VLLM_ASCEND_ENABLE_NZ": RefusedVariable(
            ("1", "2"),
            "the engine would lay out its weights in fractals (FRACTAL_NZ), which a refresh can't write into",
            "unset VLLM_ASCEND_ENABLE_NZ, or set it to 0",
        ),
    },
    expandable_segments=_expandable_segments,
    memory_bytes=_used_bytes,
    peak_memory_bytes=_peak_bytes,
    free_and_total_bytes=lazily("torch:npu.mem_get_info"),
    reset_peak_memory=lazily("torch:npu.reset_peak_memory_stats"),
    give_back_memory=lazily("torch:npu.empty_cache"),
    # CANN takes 1 GiB, HCCL two buffers (HCCL_BUFFSIZE) for each of about ten groups, kernels' workspace 0.5.
    kernels=Kernels(weighed_copies=1, libraries=4 << 30),
    bucket_bytes=256 << 20,
    link_probe_bytes=64 << 20,
    socket_variables=("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
    visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
    device_count=_device_count,
    synchronize=lazily("torch:npu.synchronize"),
    # The vendor does not promise it; a sum that saturates would depend on its order.
    wraps_integers=False,
    # A copy of a process has no CANN context, and whatever it then asks of the device may hang.
    forks=False,
    # Sums over ranks in one order; products of matrices without splitting what they sum over.
    deterministic_environment={"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
    # CPU binding would rebind the threads of the trainer too; eager until graphs were run on the device.
    profiler=_profiler,
    engine_options={
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "additional_config": {"enable_cpu_binding": False, "weight_nz_mode": 0},
    },
    after_engine_start=_restore_events,
)
