"""Qwen3-MoE: the attention of Qwen3, and experts in place of some feed-forward blocks."""

from typing import Any

from spmd_rl.models.decoder_rows import ATTENTION, EXPERTS, FEED_FORWARD, FIRST, LAST
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals, qwen_experts
from spmd_rl.models.family import Content, Family


def _shape(content: Content) -> dict[str, Any]:
    return decoder_shape(content) | {"qk_norm": True, "experts": qwen_experts(content)}


QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", (*FIRST, *ATTENTION, *FEED_FORWARD, *EXPERTS, *LAST), _shape, plain_refusals
)
