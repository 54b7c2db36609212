"""A laptop or a CI machine: the whole program over gloo, each rank on one thread."""

from __future__ import annotations

import ctypes
import resource
from typing import TYPE_CHECKING

from spmd_rl.errors import ConfigError, Problem
from spmd_rl.platforms.kernels import Kernels
from spmd_rl.platforms.platform import Platform, RefusedVariable, lazily

if TYPE_CHECKING:
    from spmd_rl.models.model_shape import ModelShape

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's kernels for CPUs are compiled for."""
# The sizes of a latent that vLLM's kernel of latent attention is compiled for, and its blocks.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_LATENT_BLOCK_TOKENS = 16


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    """Let the kernel start a new high-water mark (VmHWM) for this process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as control:
            control.write("5")
    except OSError:
        # Not allowed in some containers: the peak is then that of the whole process, which is still true.
        return


def _peak_bytes() -> int:
    """Return the highest resident memory since the last reset (VmHWM)."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trim_heap() -> None:
    """Ask glibc for the freed activations of a pass, hundreds of megabytes, which it keeps otherwise."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _engine_model_options(model_path: str, shape: ModelShape, block_tokens: int, knob: str) -> dict[str, object]:
    """Return the blocks that were asked for, or what vLLM's latent attention needs on a CPU."""
    if shape.mla is None:
        if shape.head_dim not in HEAD_SIZES:
            met = f"its attention heads have {shape.head_dim} values, and vLLM on a CPU computes those of "
            met += f"{', '.join(map(str, HEAD_SIZES))} only"
            raise ConfigError(Problem(knob, model_path, met, "use such a model, or another platform"))
        return {"block_size": block_tokens}
    found = {"kv_lora_rank": shape.mla.kv_rank, "qk_rope_head_dim": shape.mla.rope_dim}
    if found != _LATENT:
        has, wants = (" and ".join(f"{k} = {v}" for k, v in sizes.items()) for sizes in (found, _LATENT))
        met = f"its config.json has {has}, and vLLM on a CPU computes latent attention with {wants} only"
        raise ConfigError(Problem(knob, model_path, met, "use such a model, or another platform"))
    return {
        "block_size": _LATENT_BLOCK_TOKENS,
        # The kernels for AMX keep a packed copy of kv_b_proj instead of the weight that a refresh writes.
        "attention_config": {"backend": "CPU_MLA"},
        # The compiled rotary kernel of the CPU takes the slices of latent attention for contiguous: wrong, silently.
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }


def _model_environment(shape: ModelShape, *engine: int) -> dict[str, str]:
    """Have torch compile nothing for a dense model of text: vLLM has kernels for all of it, and needs no compiler."""
    compiled = shape.experts or shape.mla or shape.vision
    return {} if compiled else {"TORCHDYNAMO_DISABLE": "1"}


CPU = Platform(
    name="cpu",
    device_type="cpu",
    backend="gloo",
    environment={
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    },
    refused_environment={
        "VLLM_CPU_KVCACHE_SPACE": RefusedVariable(
            tuple("0123456789"),
            "vLLM would take so many GiB for its cache, whatever rollout.cache_gib says",
            "unset VLLM_CPU_KVCACHE_SPACE, and set rollout.cache_gib",
        )
    },
    attention=lazily("spmd_rl.platforms.sdpa_attention:prepare_sdpa"),
    memory_bytes=resident_bytes,
    peak_memory_bytes=_peak_bytes,
    reset_peak_memory=_reset_peak,
    give_back_memory=_trim_heap,
    bucket_bytes=16 << 20,
    link_probe_bytes=4 << 20,
    socket_variables=("GLOO_SOCKET_IFNAME",),
    # The first step loads LLVM, the compiled sums and vLLM's kernels.
    kernels=Kernels(
        norm_copies=2, one_call=False, heap=1.4, stays=True, libraries=170 << 20, engine=68 << 20, share=1.0
    ),
    logits=lazily("spmd_rl.platforms.cpu_logits:logits"),
    adds_gradients=True,
    fused_adamw=True,
    offloads=False,
    repeats_exactly=True,
    max_sequences=64,
    microbatch_tokens=4096,
    # Triton does not compile for CPUs; blocks of 32 tokens are the smallest that the CPU attention prefers, so that
    # the samples of a prompt find its cache.
    engine_options={"enforce_eager": True, "block_size": 32},
    engine_model_options=_engine_model_options,
    model_environment=_model_environment,
    engine_graphs=False,
    engine_returns_experts=False,
    engine_sleeps=False,
    row_sums=lazily("spmd_rl.platforms.cpu_row_sums:compiled"),
    peer_memory=lazily("spmd_rl.platforms.cpu_peer_memory:PeerMemory"),
)
