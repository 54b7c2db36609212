"""The policy as a Megatron-Core model, built from what the Hugging Face config.json says."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from spmd_rl.config.model_shape import ModelShape
from spmd_rl.training.attention import PackedAttention
from spmd_rl.training.packing import PackedTokens


class RMSNorm(torch.nn.Module):
    """Megatron's norm signature over torch's rms_norm; unlike Megatron's own, it works with sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "npu":
            from spmd_rl.platforms.npu import rms_norm

            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PositionRotary(torch.nn.Module):
    """Rotary angles at the positions that the packed tokens name, instead of at 0..T-1.

    Stands where Megatron's RotaryEmbedding would; what Megatron passes from `get_rotary_seq_len` to `forward` as a
    length are here the positions themselves.
    """

    def __init__(self, inverse_frequencies: torch.Tensor):
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def get_rotary_seq_len(
        self, inference: Any, decoder: Any, decoder_input: Any, config: Any, packed: PackedTokens
    ) -> torch.Tensor:
        return packed.positions

    def forward(self, positions: torch.Tensor, packed_seq: bool = True, cp_group: Any = None) -> torch.Tensor:
        """positions [T] -> angles [T, 1, 1, d]."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)  # [T, d/2]
        return torch.cat((angles, angles), dim=-1)[:, None, None]


class PolicyModel(GPTModel):
    """Megatron's GPTModel whose last stage returns hidden states.

    The output layer runs only where a response token is predicted, and in chunks: see training/token_logprobs.py.
    """

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """[V/tp, H], with this shard's padding rows."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T/tp or T, 1, H] of the last stage -> [T, H]; its backward sums the vocabulary shards' gradients."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0]


def transformer_config(
    shape: ModelShape, dtype: torch.dtype, tensor: int, pipeline: int, sequence: bool, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of a model that HF's config.json describes."""
    return TransformerConfig(
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
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=sequence and tensor > 1,
        # Micro-batches differ in length; Megatron allows that only with this dispatcher, dense models included.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss's denominators are global and known beforehand: Megatron must neither average nor rescale.
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build_model(shape: ModelShape, config: TransformerConfig) -> PolicyModel:
    """This rank's shard, uninitialised: weights/load.py fills it."""
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    tensor = config.tensor_model_parallel_size
    model = PolicyModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm),
        vocab_size=math.ceil(shape.vocabulary / tensor) * tensor,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model.rotary_pos_emb = PositionRotary(inverse_frequencies(shape))
    _mark_shards(model)
    return model


def _mark_shards(model: torch.nn.Module) -> None:
    """Mark parameters as tensor-parallel shards, which Megatron does only when it also initialises them.

    Without the marks the gradient norm counts the shards of tensor rank 0 alone.
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


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Rotary frequencies [d/2] of the model, with Llama 3's scaling where config.json asks for it.

    Raises ValueError for a scaling that is not known here.
    """
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    scaling = shape.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind != "llama3":
        raise ValueError(
            f"model.path: rope scaling '{kind}' in config.json is not supported; default, linear and llama3 are"
        )
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / factor + smooth * inverse
