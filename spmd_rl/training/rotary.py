"""Rotary positions: the frequencies that config.json means, and their angles at the packed tokens' own positions."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.packing import PackedTokens


class PositionRotary(torch.nn.Module):
    """Sines and cosines of the positions that the packed tokens name, once for all layers.

    Stands where Megatron's RotaryEmbedding would; what Megatron passes from `get_rotary_seq_len` to `forward` as a
    length are here the positions themselves, and what its layers get as angles are cosines beside sines: the patch of
    its `apply_rotary_pos_emb` turns queries and keys by them.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, factor: float, dtype: torch.dtype, axes: Sequence[int] = ()):
        """`factor`: of sine and cosine. `axes`: of each frequency, the position that turns it where tokens have three,
        see ModelShape.rope_axes.
        """
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)
        self.factor, self.dtype, self.axes = factor, dtype, list(axes)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_rotary_seq_len(
        self, inference: object, decoder: object, decoder_input: object, config: Any, packed: PackedTokens
    ) -> torch.Tensor:
        return packed.positions

    def forward(self, positions: torch.Tensor, packed_seq: bool = True, cp_group: object = None) -> Any:
        """positions [T] or [3, T] -> cosines and sines [T, 1, 2d]."""
        if self._last is None or self._last[0] is not positions:
            self._last = positions, self._turns(positions)
        return self._last[1]

    def _turns(self, positions: torch.Tensor) -> torch.Tensor:
        if positions.dim() == 2:
            angles = positions[self.axes].T.float() * self.inverse_frequencies  # [T, d/2]
        else:
            angles = torch.outer(positions.float(), self.inverse_frequencies)  # [T, d/2]
        parts = [(turn(angles) * self.factor).to(self.dtype) for turn in (torch.cos, torch.sin)]
        return torch.cat([part for part in parts for _ in range(2)], dim=-1)[:, None]


class LatentRotary(PositionRotary):
    """The same for latent attention, whose layers ask for it one by one, and for a factor beside it."""

    def forward(self, positions: torch.Tensor, packed_seq: bool = True, cp_group: object = None) -> Any:
        """positions [T] -> (cosines and sines [T, 1, 2d], 1: the factor is in them)."""
        return super().forward(positions), 1.0


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Rotary frequencies [d/2] of the model, with the scaling that config.json asks for.

    Raises ValueError for a scaling that is not known here.
    """
    dim = shape.mla.rope_dim if shape.mla is not None else shape.head_dim
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return inverse
    if scaling["rope_type"] == "linear":
        return inverse / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        return _llama3(inverse, scaling)
    if scaling["rope_type"] == "yarn":
        return _yarn(inverse, shape.rope_theta, scaling)
    raise ValueError(
        f"model.path: rope scaling '{scaling['rope_type']}' in config.json is not supported; default, linear, llama3 "
        "and yarn are"
    )


def angle_factor(shape: ModelShape) -> float:
    """Return YaRN's factor of sine and cosine; 1 without YaRN; as transformers' `_compute_yarn_parameters`."""
    scaling = shape.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, mscale_all = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's temperature for a context that is `factor` times as long (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(inverse: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / factor + smooth * inverse


def _yarn(inverse: torch.Tensor, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Fast rotations stay, slow ones are interpolated, with a ramp between (arXiv 2309.00071, section 3.2)."""
    dim = 2 * len(inverse)
    original = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return inverse * (1 - ramp) + inverse / scaling["factor"] * ramp
