"""Attention over packed tokens, through torch's scaled_dot_product_attention (CPU, CUDA) or the NPU's fused kernel."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from spmd_rl.training.packing import PackedTokens, Segment


class PackedAttention(MegatronModule):
    """Megatron's core attention for `PackedTokens`: causal within a sequence, responses also see their group's prompt.

    Stands where Megatron's DotProductAttention would, which refuses packed sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ):
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        """query [T, heads/tp, d], key and value [T, kv heads/tp, d] -> [T, heads/tp * d]."""
        assert packed_seq_params is not None and attention_bias is None
        attend = _npu_attention if query.device.type == "npu" else _segment_attention
        return attend(query, key, value, packed_seq_params.segments, self.scale).flatten(1)


def _segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...], scale: float
) -> torch.Tensor:
    """One call a sequence, two a group with a shared prompt; nothing is padded but the responses of one group."""
    outputs = []
    for segment in segments:
        prompt = slice(segment.start, segment.start + segment.prompt_tokens)
        outputs.append(_causal(query[prompt], key[prompt], value[prompt], scale))
        if segment.response_tokens:
            outputs.append(_continue_prompt(query, key, value, segment, scale))
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    """The responses of one group, as a batch: each sees the whole prompt and its own past."""
    lengths = segment.response_tokens
    longest = max(lengths)
    prompt = slice(segment.start, segment.start + segment.prompt_tokens)
    rows = slice(prompt.stop, segment.end)
    if longest == 0:
        return query[rows]
    mask = torch.ones(longest, segment.prompt_tokens + longest, dtype=torch.bool, device=query.device).tril(
        segment.prompt_tokens
    )
    key, value = (
        torch.cat(
            [
                tensor[prompt].transpose(0, 1).expand(len(lengths), -1, -1, -1),
                _batch(tensor[rows], lengths, longest),
            ],
            dim=2,
        )
        for tensor in (key, value)
    )
    out = F.scaled_dot_product_attention(
        _batch(query[rows], lengths, longest),
        key,
        value,
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return torch.cat([out[i, :, :length].transpose(0, 1) for i, length in enumerate(lengths)])


def _batch(rows: torch.Tensor, lengths: tuple[int, ...], longest: int) -> torch.Tensor:
    """Consecutive sequences [sum(lengths), heads, d] -> right-padded [sequences, heads, longest, d]."""
    parts = rows.split(lengths)
    padded = [F.pad(part, (0, 0, 0, 0, 0, longest - length)) for part, length in zip(parts, lengths, strict=True)]
    return torch.stack(padded).transpose(1, 2)


def _npu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...], scale: float
) -> torch.Tensor:
    """The NPU's fused attention in its packed (TND) form; shared prompts are not laid out on NPUs."""
    import torch_npu

    assert not any(segment.response_tokens for segment in segments)
    # Cumulative ends without a leading 0, as a host list; sparse_mode 3 is the causal mask aligned to the last token.
    ends = [segment.end for segment in segments]
    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=query.device), diagonal=1)
    return torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=mask,
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=3,
    )[0]
