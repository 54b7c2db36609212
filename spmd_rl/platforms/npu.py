"""Ascend NPUs over HCCL (torch_npu, vllm-ascend)."""

import torch

from spmd_rl.platforms.platform import Platform


def _claim(local_rank: int) -> None:
    """Make the die current, then let Megatron-Core's `torch.cuda` mean `torch.npu`.

    The order is the vendor's: the device is touched before `megatron.core` is imported, because Megatron binds
    `torch.cuda._lazy_init` at import and that call only returns early once the device is initialised.
    """
    import torch_npu  # noqa: F401  (registers the device)

    torch.npu.set_device(local_rank)
    torch.npu.synchronize()
    from torch_npu.contrib import transfer_to_npu  # noqa: F401  (redirects torch.cuda for Megatron-Core)

    # Storages in the FRACTAL_NZ layout cannot be written in place by a refresh.
    torch.npu.config.allow_internal_format = False
    if not torch.cuda.default_generators:
        torch.cuda.default_generators = torch.npu.default_generators


def _restore_events() -> None:
    """vllm-ascend leaves a placeholder in `torch.cuda.Event`; Megatron's timers need the real one's `elapsed_time`."""
    torch.cuda.Event = torch.npu.Event


def packed_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float
) -> torch.Tensor:
    """The fused kernel over sequences that lie one after another (TND): [T, heads, d] -> [T, heads, d].

    `ends`: the cumulative ends of the sequences, on the host and without a leading 0.
    """
    import torch_npu

    # True is masked; sparse_mode 3 is the causal mask aligned to the last token, in this compressed size.
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=query.device), diagonal=1)
    return torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=mask,
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=3,
    )[0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The fused norm over the last dimension."""
    import torch_npu

    return torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]


NPU = Platform(
    name="npu",
    device_type="npu",
    backend="cpu:gloo,npu:hccl",
    vllm_package="vllm",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "TASK_QUEUE_ENABLE": "1",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "7200",
        "HCCL_EVENT_TIMEOUT": "7260",
        "HCCL_BUFFSIZE": "128",
        "TORCH_NPU_DEVICE_CAPABILITY": "8.0",
        "TOKENIZERS_PARALLELISM": "false",
    },
    claim=_claim,
    memory_bytes=lambda: torch.npu.memory_reserved(),
    peak_memory_bytes=lambda: torch.npu.max_memory_reserved(),
    reset_peak_memory=lambda: torch.npu.reset_peak_memory_stats(),
    bucket_bytes=256 << 20,
    give_back_memory=lambda: torch.npu.empty_cache(),
    # CPU binding would rebind the threads of the trainer too; eager until graphs were run on the device.
    engine_options={
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "additional_config": {"enable_cpu_binding": False, "weight_nz_mode": 0},
    },
    after_engine_start=_restore_events,
)
