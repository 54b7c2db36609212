"""Attention over packed tokens, through the platform's kernel."""

import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from spmd_rl.training.context import share_heads, share_tokens
from spmd_rl.training.packing import PackedTokens


class PackedAttention(MegatronModule):
    """Megatron's core attention for `PackedTokens`: causal within a sequence, responses also see their group's prompt.

    Stands where Megatron's DotProductAttention would, which refuses packed sequences. With context parallelism it is
    given a chunk of the tokens, and changes it for all tokens of a part of the heads and back.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: object,
    ):
        super().__init__(config=config)
        self.context_group = parallel_state.get_context_parallel_group()
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedTokens | None = None,
    ) -> torch.Tensor:
        """query [T, heads/tp, d], key [T, kv heads/tp, d], value [T, kv heads/tp, v] -> [T, heads/tp * v].

        T: tokens of this context rank's chunk.
        """
        assert packed_seq_params is not None and packed_seq_params.attend is not None and attention_bias is None
        if self.context_group.size() > 1:
            query, key, value = share_heads(query, key, value, self.context_group)
        width = value.shape[-1]
        if width < query.shape[-1]:
            # Fused kernels want values as wide as queries; latent attention has narrower ones.
            value = F.pad(value, (0, query.shape[-1] - width))
        out = packed_seq_params.attend(query, key, value, self.scale)[..., :width]  # [all T, some heads, v]
        if self.context_group.size() > 1:
            out = share_tokens(out, self.context_group)
        return out.flatten(1)
