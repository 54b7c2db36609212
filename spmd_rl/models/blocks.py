"""Describe the parts that not every model has: experts, latent attention, a vision tower."""

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


@dataclass(frozen=True)
class Vision:
    """Hold the sizes of a vision tower, and the tokens that stand for images.

    A patch is a square of pixels, `temporal` frames deep; the features of merge x merge patches become one token.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    """Pixels along each side of a patch."""
    temporal: int
    channels: int
    merge: int
    """Patches along each side of what becomes one token."""
    image_token: int
    config: str
    """The vision part of config.json, as JSON: the tower is built from it."""

    @property
    def merged(self) -> int:
        """Return the channels of the patches that become one token."""
        return self.hidden * self.merge**2

    @property
    def patch_elements(self) -> int:
        """Return the numbers that describe one patch, as the tower takes it."""
        return self.channels * self.temporal * self.patch**2
