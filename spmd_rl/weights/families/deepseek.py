"""DeepSeek-V3 and R1: latent attention, shared and routed experts with a bias in the choice, first layers dense."""

from spmd_rl.weights.families.decoder import (
    EXPERTS,
    FEED_FORWARD,
    FIRST,
    LAST,
    LAYER,
    NORM_BEFORE_ATTENTION,
    TRAINED,
    shared_experts,
    sparse_block,
)
from spmd_rl.weights.families.table import Row, Sizes


def _low_rank_q(shape: Sizes, layer: int) -> bool:
    return shape.mla is not None and shape.mla.q_rank > 0


def _full_rank_q(shape: Sizes, layer: int) -> bool:
    return not _low_rank_q(shape, layer)


_ATTENTION = LAYER + "self_attn."
_TRAINED = TRAINED + "self_attention."

LATENT_ATTENTION: tuple[Row, ...] = (
    NORM_BEFORE_ATTENTION,
    Row(
        {_ATTENTION + "q_proj.weight": "q hidden"},
        megatron=_TRAINED + "linear_q_proj.weight",
        vllm=_ATTENTION + "q_proj.weight",
        cut="rows",
        when=_full_rank_q,
    ),
    # Down projections are whole on every rank; the engine has both in one parameter, where there are two.
    Row(
        {_ATTENTION + "q_a_proj.weight": "q_rank hidden"},
        megatron=_TRAINED + "linear_q_down_proj.weight",
        vllm=None,
        cut="whole",
        when=_low_rank_q,
    ),
    Row(
        {_ATTENTION + "kv_a_proj_with_mqa.weight": "kv_down hidden"},
        megatron=_TRAINED + "linear_kv_down_proj.weight",
        vllm=None,
        cut="whole",
    ),
    Row(
        {
            _ATTENTION + "q_a_proj.weight": "q_rank hidden",
            _ATTENTION + "kv_a_proj_with_mqa.weight": "kv_down hidden",
        },
        megatron=None,
        vllm=_ATTENTION + "fused_qkv_a_proj.weight",
        cut="whole",
        when=_low_rank_q,
    ),
    Row(
        {_ATTENTION + "kv_a_proj_with_mqa.weight": "kv_down hidden"},
        megatron=None,
        vllm=_ATTENTION + "kv_a_proj_with_mqa.weight",
        cut="whole",
        when=_full_rank_q,
    ),
    Row(
        {_ATTENTION + "q_a_layernorm.weight": "q_rank"},
        megatron=_TRAINED + "q_layernorm.weight",
        vllm=_ATTENTION + "q_a_layernorm.weight",
        cut="whole",
        when=_low_rank_q,
    ),
    Row(
        {_ATTENTION + "q_b_proj.weight": "q q_rank"},
        megatron=_TRAINED + "linear_q_up_proj.weight",
        vllm=_ATTENTION + "q_b_proj.weight",
        cut="rows",
        when=_low_rank_q,
    ),
    Row(
        {_ATTENTION + "kv_a_layernorm.weight": "kv_rank"},
        megatron=_TRAINED + "kv_layernorm.weight",
        vllm=_ATTENTION + "kv_a_layernorm.weight",
        cut="whole",
    ),
    Row(
        {_ATTENTION + "kv_b_proj.weight": "kv_up kv_rank"},
        megatron=_TRAINED + "linear_kv_up_proj.weight",
        vllm=_ATTENTION + "kv_b_proj.weight",
        cut="rows",
    ),
    Row(
        {_ATTENTION + "o_proj.weight": "hidden v"},
        megatron=_TRAINED + "linear_proj.weight",
        vllm=_ATTENTION + "o_proj.weight",
        cut="columns",
    ),
)

DEEPSEEK_V3: tuple[Row, ...] = (
    *FIRST,
    *LATENT_ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    Row(
        {LAYER + "mlp.gate.e_score_correction_bias": "experts"},
        megatron=TRAINED + "mlp.router.expert_bias",
        vllm=LAYER + "mlp.gate.e_score_correction_bias",
        cut="whole",
        when=sparse_block,
    ),
    *shared_experts("shared_experts"),
    *LAST,
)
