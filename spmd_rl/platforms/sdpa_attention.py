"""Attention through torch's scaled_dot_product_attention, for every device and dtype that torch has."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from spmd_rl.platforms.attention_layout import Attend, AttentionLayout, QuerySequence


@dataclass(frozen=True)
class _Responses:
    """R responses that continue one prompt of P tokens, as a batch of length L; indices count packed tokens."""

    queries: torch.Tensor
    """[R, L]; past a response's end any token, whose result is dropped."""
    keys: torch.Tensor
    """[R, P + L]: the prompt, then the response."""
    mask: torch.Tensor
    """[L, P + L] bool: each token sees the prompt and its own past."""
    real: torch.Tensor
    """Positions of the responses' own tokens in the flattened [R * L]."""


def prepare_sdpa(layout: AttentionLayout) -> Attend:
    """Make one call of a whole sequence, and one of the responses to one prompt: only those of a group are padded."""
    calls = list(_calls(layout))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.cat(
            [
                _continue_prompt(query, key, value, call, scale)
                if isinstance(call, _Responses)
                else _causal(query[call], key[call], value[call], scale)
                for call in calls
            ]
        )

    return attend


def _calls(layout: AttentionLayout) -> Iterator[slice | _Responses]:
    for prompt, sequences in groupby(layout.sequences, lambda sequence: sequence.prompt):
        if prompt.stop:
            yield _responses(prompt, list(sequences), layout.device)
        else:
            yield from (slice(sequence.start, sequence.end) for sequence in sequences)


def _responses(prompt: slice, sequences: list[QuerySequence], device: torch.device) -> _Responses:
    starts = torch.tensor([sequence.start for sequence in sequences])
    lengths = torch.tensor([sequence.end - sequence.start for sequence in sequences])
    longest = int(lengths.max())
    ahead = torch.arange(longest)
    inside = ahead < lengths[:, None]  # [R, L]
    queries = (starts[:, None] + ahead).where(inside, torch.tensor(prompt.start))
    prompts = torch.arange(prompt.start, prompt.stop)
    mask = torch.ones(longest, len(prompts) + longest, dtype=torch.bool).tril(len(prompts))
    return _Responses(
        queries.to(device),
        torch.cat((prompts.expand(len(sequences), -1), queries), dim=1).to(device),
        mask.to(device),
        inside.flatten().nonzero()[:, 0].to(device),
    )


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend in one sequence: query [L, heads, d] -> [L, heads, d]."""
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, responses: _Responses, scale: float
) -> torch.Tensor:
    """Attend in the responses of one group, as a batch -> [their tokens, heads, d]."""

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
