"""Qwen2-MoE: the attention of Qwen2, experts in place of some feed-forward blocks, and a shared one with a gate."""

from typing import Any

from spmd_rl.models.decoder_rows import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    FIRST,
    LAST,
    shared_experts,
    sparse_block,
    tensor_row,
)
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals, qwen_experts
from spmd_rl.models.family import Content, Family

_GATE = tensor_row("mlp.shared_expert_gate.weight", "one hidden", "mlp.shared_experts.gate_weight", when=sparse_block)


def _shape(content: Content) -> dict[str, Any]:
    return decoder_shape(content) | {
        "qkv_bias": bool(content.get("qkv_bias", True)),
        "experts": qwen_experts(content, int(content["shared_expert_intermediate_size"])),
    }


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (*FIRST, *ATTENTION, *FEED_FORWARD, *EXPERTS, *shared_experts("shared_expert"), _GATE, *LAST),
    _shape,
    plain_refusals,
)
