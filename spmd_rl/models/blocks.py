"""Describe the blocks of a layer that not every decoder has: experts, and latent attention."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Experts:
    """Hold the sizes of the sparse feed-forward blocks of a model."""

    count: int
    """Routed experts of a sparse layer."""
    per_token: int
    ffn: int
    """Channels of one routed expert."""
    shared_ffn: int
    """Channels of all shared experts of a layer together; 0: none."""
    shared_gate: bool
    """A learned gate scales the shared experts (Qwen2-MoE)."""
    sparse: tuple[bool, ...]
    """For each layer, True where its feed-forward block is one of these."""
    scores: Literal["softmax", "sigmoid"]
    normalized: bool
    """The weights of the chosen experts are made to sum to 1."""
    bias: bool
    """A bias for each expert takes part in the choice and not in the weights (DeepSeek-V3)."""
    groups: int
    """The experts form so many groups, of which only `groups_per_token` are chosen from; 1: no groups."""
    groups_per_token: int
    scale: float
    """Factor on the weights of the routed experts."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values from a common low-rank projection."""

    q_rank: int
    """0: queries come straight from the hidden state."""
    kv_rank: int
    nope_dim: int
    """Part of a query or key head without positions."""
    rope_dim: int
    """Part with rotary positions; the key's is common to all heads."""
    v_dim: int
