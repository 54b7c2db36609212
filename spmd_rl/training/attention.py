"""Attention over packed tokens, through torch's scaled_dot_product_attention (CPU, CUDA) or the NPU's fused kernel."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from spmd_rl.training.context import share_heads, share_tokens
from spmd_rl.training.packing import PackedTokens, Responses, Segment


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
        **options: Any,
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
        assert packed_seq_params is not None and attention_bias is None
        if self.context_group.size() == 1:
            out = self._attend(query, key, value, packed_seq_params.segments)
        else:
            query, key, value = share_heads(query, key, value, self.context_group)
            out = share_tokens(self._attend(query, key, value, packed_seq_params.segments), self.context_group)
        return out.flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...]
    ) -> torch.Tensor:
        """All tokens of the micro-batch and some heads -> [T, heads, v]."""
        attend = _npu_attention if query.device.type == "npu" else _segment_attention
        width = value.shape[-1]
        if width < query.shape[-1]:
            # Fused kernels want values as wide as queries; latent attention has narrower ones.
            value = F.pad(value, (0, query.shape[-1] - width))
        return attend(query, key, value, segments, self.scale)[..., :width]


def _segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...], scale: float
) -> torch.Tensor:
    """One call a sequence, two a group with a shared prompt; nothing is padded but the responses of one group."""
    outputs = []
    for segment in segments:
        prompt = slice(segment.start, segment.start + segment.prompt_tokens)
        outputs.append(_causal(query[prompt], key[prompt], value[prompt], scale))
        if segment.responses is not None:
            outputs.append(_continue_prompt(query, key, value, segment.responses, scale))
    return torch.cat(outputs)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: query [L, heads, d] -> [L, heads, d]."""
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


def _continue_prompt(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, responses: Responses, scale: float
) -> torch.Tensor:
    """The R responses of one group, as a batch: each sees the prompt and its own past -> [their tokens, heads, d]."""

    def batch(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        batch(query, responses.queries),
        batch(key, responses.keys),
        batch(value, responses.keys),
        attn_mask=responses.mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, responses.real)


def _npu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...], scale: float
) -> torch.Tensor:
    """The NPU's fused attention; shared prompts are not laid out on NPUs."""
    from spmd_rl.platforms.npu import packed_causal_attention

    assert not any(segment.responses for segment in segments)
    return packed_causal_attention(query, key, value, [segment.end for segment in segments], scale)
