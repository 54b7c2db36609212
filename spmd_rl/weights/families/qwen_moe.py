"""Qwen2-MoE and Qwen3-MoE: the attention of Qwen2 and Qwen3, and experts in place of some feed-forward blocks."""

from spmd_rl.weights.families.decoder import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    FIRST,
    LAST,
    LAYER,
    TRAINED,
    shared_experts,
    sparse_block,
)
from spmd_rl.weights.families.table import Row

QWEN3_MOE: tuple[Row, ...] = (*FIRST, *ATTENTION, *FEED_FORWARD, *EXPERTS, *LAST)

QWEN2_MOE: tuple[Row, ...] = (
    *FIRST,
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    *shared_experts("shared_expert"),
    Row(
        {LAYER + "mlp.shared_expert_gate.weight": "one hidden"},
        megatron=TRAINED + "mlp.shared_experts.gate_weight",
        vllm=LAYER + "mlp.shared_expert_gate.weight",
        cut="whole",
        when=sparse_block,
    ),
    *LAST,
)
