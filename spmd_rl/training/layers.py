"""The layers of the model as Megatron's specs: which module computes which part, without Transformer Engine."""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from spmd_rl.platforms import current
from spmd_rl.training.attention import PackedAttention
from spmd_rl.training.expert_balance import BalancingRouter
from spmd_rl.training.experts import GroupedExperts, Layer


class RMSNorm(torch.nn.Module):
    """Call the platform's kernel under Megatron's signature; unlike Megatron's own it works with sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: object):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps
        self.kernel = current().rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x, self.weight, self.eps)


def layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """One layer, whose feed-forward block is one of experts (`sparse`) or an ordinary one."""
    return ModuleSpec(
        Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_latent_attention(config) if config.multi_latent_attention else _attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts(config) if sparse else ModuleSpec(MLP, submodules=_feed_forward()),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            # The down projections are whole on every rank, over its part of the sequence. Cut in columns, the part of
            # the key that all heads have in common would get the gradient of the rank's own heads only.
            linear_q_down_proj=Linear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=Linear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


def _feed_forward() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _experts(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(GroupedExperts),
            shared_experts=ModuleSpec(SharedExpertMLP, submodules=_feed_forward()),
            router=TopKRouter if config.moe_router_load_balancing_type == "none" else BalancingRouter,
        ),
    )


def mark_parameters(model: torch.nn.Module) -> None:
    """Mark on each parameter which ranks hold what of it, where Megatron leaves that out.

    Megatron marks tensor-parallel shards only when it also initialises them, and without the marks the gradient norm
    counts the shards of tensor rank 0 alone. Experts mark their own, see training/experts.py.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dimension = 0
        elif isinstance(module, RowParallelLinear):
            dimension = 1
        else:
            continue
        for parameter in (module.weight, getattr(module, "bias", None) if dimension == 0 else None):
            if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
