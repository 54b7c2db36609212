"""Megatron's configuration of a model that HF's config.json describes, in a layout."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from spmd_rl.config.config import TrainConfig
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.blocks import Experts, LatentAttention
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms import current


def transformer_config(
    shape: ModelShape, layout: TrainLayout, dtype: torch.dtype, sequence: bool, train: TrainConfig
) -> TransformerConfig:
    """Megatron's configuration of a model that HF's config.json describes. Raises ValueError when it can't be."""
    options: dict[str, Any] = {}
    if layout.pipeline > 1:
        options |= _pipeline(shape, layout)
    if shape.experts is not None:
        options |= _experts(shape.experts, layout, train.moe_aux_loss_coefficient > 0.0)
    if shape.mla is not None:
        options |= _latent_attention(shape, shape.mla)
    return (TransformerConfig if shape.mla is None else MLATransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        layernorm_epsilon=shape.rms_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        # Latent attention always has norms on its compressed queries and keys.
        qk_layernorm=shape.qk_norm or shape.mla is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        # What PackedAttention does.
        cp_comm_type="a2a",
        sequence_parallel=sequence and layout.tensor > 1,
        # Micro-batches differ in length; Megatron allows that only with this dispatcher, dense models included.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss's denominators are global and known beforehand: Megatron must neither average nor rescale.
        calculate_per_token_loss=True,
        **_recomputed(train),
        gradient_accumulation_fusion=current().adds_gradients,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def _recomputed(train: TrainConfig) -> dict[str, Any]:
    if train.recomputes == "none":
        return {}
    if train.recomputes == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(train.recompute_modules)}
    method = "block" if train.recompute_layers else "uniform"
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": train.recompute_layers or 1,
    }


def _pipeline(shape: ModelShape, layout: TrainLayout) -> dict[str, Any]:
    chunks = [["decoder"] * len(layers) for layers in layout.chunk_layers(shape.layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    # With two stages the neighbour before is the neighbour after. A virtual pipeline sends both ways at once, and only
    # without batching does Megatron keep the two messages apart.
    apart = layout.virtual > 1
    return {"pipeline_model_parallel_layout": chunks, "overlap_p2p_comm": apart, "batch_p2p_comm": not apart}


def _experts(experts: Experts, layout: TrainLayout, balanced: bool) -> dict[str, Any]:
    if experts.scores == "sigmoid" and not experts.normalized:
        raise ValueError("model.path: norm_topk_prob is off in config.json, which is not supported with sigmoid scores")
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_layer_freq": [int(sparse) for sparse in experts.sparse],
        "moe_router_score_function": experts.scores,
        # The softmax over all experts leaves the chosen weights unnormalised, that over the chosen ones doesn't.
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalized,
        "moe_router_enable_expert_bias": experts.bias,
        # The bias is the model's, like any weight: it doesn't follow the load of the experts.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.groups_per_token if experts.groups > 1 else None,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        # Its coefficient is set for the passes that have one, see training/expert_balance.py.
        "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
        "moe_router_dtype": "fp32",
        # Megatron's grouped multiplication is Transformer Engine's.
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _latent_attention(shape: ModelShape, mla: LatentAttention) -> dict[str, Any]:
    scaling = shape.rope_scaling or {}
    yarn = scaling.get("rope_type") == "yarn"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        # Megatron's word for a rotary module that gives a factor beside its table, as LatentRotary does for all kinds.
        "rope_type": "yarn",
        # All that these two still decide is the scale of the softmax.
        "rotary_scaling_factor": scaling["factor"] if yarn else 1.0,
        "mscale_all_dim": (scaling.get("mscale_all_dim") or 0.0) if yarn else 0.0,
    }
