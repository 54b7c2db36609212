"""NVIDIA GPUs over NCCL."""

import torch

from spmd_rl.platforms.platform import Platform

CUDA = Platform(
    name="cuda",
    device_type="cuda",
    backend="cpu:gloo,cuda:nccl",
    vllm_package="vllm",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Megatron-Core's sequence parallel overlap counts on one hardware queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    },
    claim=lambda local_rank: torch.cuda.set_device(local_rank),
    memory_bytes=lambda: torch.cuda.memory_reserved(),
    peak_memory_bytes=lambda: torch.cuda.max_memory_reserved(),
    reset_peak_memory=lambda: torch.cuda.reset_peak_memory_stats(),
    bucket_bytes=256 << 20,
    give_back_memory=lambda: torch.cuda.empty_cache(),
    engine_options={"enable_sleep_mode": True},
)
