"""A machine in one file, as another package would bring it: a host whose attention is a plain masked softmax, and from
which models and optimizers are offloaded as from a device."""

import time

import torch

from spmd_rl.platforms.attention_layout import Attend, AttentionLayout
from spmd_rl.platforms.platform import Platform

calls = {"attention": 0, "rms_norm": 0}


def prepare_attention(layout: AttentionLayout) -> Attend:
    """From gathered keys and cumulative lengths alone, as the kernels for variable lengths take them."""
    rows, query_ends, key_ends = layout.rows(), layout.query_ends, layout.key_ends

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        calls["attention"] += 1
        if rows is not None:
            key, value = key[rows], value[rows]
        return masked_softmax(query, key, value, query_ends, key_ends, scale)

    return attend


def masked_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: list[int],
    key_ends: list[int],
    scale: float,
) -> torch.Tensor:
    """query [T, heads, d], key and value [K, kv heads, d] -> [T, heads, d]; causal, aligned at the bottom right."""
    assert query_ends[-1] == len(query) and key_ends[-1] == len(key) == len(value)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    out, q0, k0 = [], 0, 0
    for q1, k1 in zip(query_ends, key_ends, strict=True):
        assert q0 < q1 and q1 - q0 <= k1 - k0
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * scale
        sees = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value[k0:k1]))
        q0, k0 = q1, k1
    return torch.cat(out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    calls["rms_norm"] += 1
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


TOY = Platform(
    name="toy",
    device_type="cpu",
    backend="gloo",
    environment={
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    },
    attention=prepare_attention,
    rms_norm=rms_norm,
    memory_bytes=lambda: 1 << 20,
    peak_memory_bytes=lambda: 1 << 20,
    reset_peak_memory=lambda: None,
    give_back_memory=lambda: None,
    bucket_bytes=100_000,
    link_probe_bytes=1 << 16,
    socket_variables=("GLOO_SOCKET_IFNAME",),
    # To Megatron-Core and vLLM it is a CPU.
    patched_as="cpu",
    # What waits on the host has no memory meanwhile: whoever reads it then reads nothing.
    offloads=True,
    wraps_integers=False,
    forks=False,
    synchronize=lambda: time.sleep(0),
    engine_options={"enforce_eager": True, "block_size": 32},
    engine_sleeps=False,
)
