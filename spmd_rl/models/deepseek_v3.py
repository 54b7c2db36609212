"""DeepSeek-V3 and R1: latent attention, shared and routed experts with a bias in the choice, first layers dense."""

from typing import Any

from spmd_rl.models.blocks import Experts, LatentAttention
from spmd_rl.models.decoder_rows import (
    EXPERTS,
    FEED_FORWARD,
    FIRST,
    LAST,
    NORM_BEFORE_ATTENTION,
    layer_row,
    shared_experts,
    sparse_block,
    tensor_row,
)
from spmd_rl.models.decoder_shape import decoder_refusals, decoder_shape
from spmd_rl.models.family import OTHER, Content, Family, Refusal
from spmd_rl.models.weight_rows import Row, Sizes


def _shape(content: Content) -> dict[str, Any]:
    mla = LatentAttention(
        q_rank=int(content.get("q_lora_rank") or 0),
        kv_rank=int(content["kv_lora_rank"]),
        nope_dim=int(content["qk_nope_head_dim"]),
        rope_dim=int(content["qk_rope_head_dim"]),
        v_dim=int(content["v_head_dim"]),
    )
    found = decoder_shape(content)
    sizes = {"kv_heads": found["heads"], "head_dim": mla.nope_dim + mla.rope_dim}
    return found | sizes | {"mla": mla, "experts": _experts(content)}


def _experts(content: Content) -> Experts:
    dense, ffn = int(content.get("first_k_dense_replace", 3)), int(content["moe_intermediate_size"])
    return Experts(
        count=int(content["n_routed_experts"]),
        per_token=int(content["num_experts_per_tok"]),
        ffn=ffn,
        shared_ffn=ffn * int(content.get("n_shared_experts") or 0),
        shared_gate=False,
        sparse=tuple(layer >= dense for layer in range(int(content["num_hidden_layers"]))),
        scores="sigmoid",
        normalized=bool(content.get("norm_topk_prob", True)),
        bias=True,
        groups=int(content.get("n_group") or 1),
        groups_per_token=int(content.get("topk_group") or 1),
        scale=float(content.get("routed_scaling_factor", 1.0)),
    )


def _refuses(content: Content) -> list[Refusal]:
    refused, experts = decoder_refusals(content), _experts(content)
    # Megatron scores a group of experts by its best per_token / groups_per_token, transformers and vLLM by two.
    if experts.groups > 1 and experts.per_token // experts.groups_per_token != 2:
        met = f"num_experts_per_tok = {experts.per_token} with topk_group = {experts.groups_per_token}"
        refused.append((met, "supported is twice as many experts as groups for a token, as in DeepSeek-V3"))
    if not experts.normalized:
        refused.append(("norm_topk_prob is off, which is not supported with sigmoid scores", OTHER))
    if content.get("rope_interleave") is False:
        refused.append(("rope_interleave is off, which is not supported", OTHER))
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if content.get(key, only) != only:
            refused.append((f"{key} is {content[key]}", f"supported is {only}"))
    return refused


def _low_rank_q(shape: Sizes, layer: int) -> bool:
    return shape.mla is not None and shape.mla.q_rank > 0


def _full_rank_q(shape: Sizes, layer: int) -> bool:
    return not _low_rank_q(shape, layer)


_Q_A, _KV_A = {"self_attn.q_a_proj.weight": "q_rank hidden"}, {"self_attn.kv_a_proj_with_mqa.weight": "kv_down hidden"}
_KV_A_NAME, _FUSED = next(iter(_KV_A)), "self_attn.fused_qkv_a_proj.weight"

_LATENT: tuple[Row, ...] = (
    NORM_BEFORE_ATTENTION,
    tensor_row("self_attn.q_proj.weight", "q hidden", "self_attention.linear_q_proj.weight", "rows", _full_rank_q),
    # Down projections are whole on every rank; the engine has both in one parameter, where there are two.
    layer_row(_Q_A, "self_attention.linear_q_down_proj.weight", None, "whole", _low_rank_q),
    layer_row(_KV_A, "self_attention.linear_kv_down_proj.weight", None, "whole"),
    layer_row(_Q_A | _KV_A, None, _FUSED, "whole", _low_rank_q),
    layer_row(_KV_A, None, _KV_A_NAME, "whole", _full_rank_q),
    tensor_row("self_attn.q_a_layernorm.weight", "q_rank", "self_attention.q_layernorm.weight", when=_low_rank_q),
    tensor_row("self_attn.q_b_proj.weight", "q q_rank", "self_attention.linear_q_up_proj.weight", "rows", _low_rank_q),
    tensor_row("self_attn.kv_a_layernorm.weight", "kv_rank", "self_attention.kv_layernorm.weight"),
    tensor_row("self_attn.kv_b_proj.weight", "kv_up kv_rank", "self_attention.linear_kv_up_proj.weight", "rows"),
    tensor_row("self_attn.o_proj.weight", "hidden v", "self_attention.linear_proj.weight", "columns"),
)

_ROWS: tuple[Row, ...] = (
    *FIRST,
    *_LATENT,
    *FEED_FORWARD,
    *EXPERTS,
    tensor_row("mlp.gate.e_score_correction_bias", "experts", "mlp.router.expert_bias", when=sparse_block),
    *shared_experts("shared_experts"),
    *LAST,
)

DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", _ROWS, _shape, _refuses, scores=False, extra_layers=True)
