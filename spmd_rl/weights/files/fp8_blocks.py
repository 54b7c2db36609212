"""Weights in float8 with a scale for each block, as DeepSeek-V3 and R1 are published: bfloat16 when they are read."""

import torch

FP8 = "F8_E4M3"
"""As safetensors calls it."""
SCALE = "_scale_inv"
"""Ends the name of the scales of a weight's blocks."""


def blocks_of(start: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int]) -> tuple[slice, slice]:
    """Return the blocks that a part of a weight lies in."""
    rows, columns = (
        slice(first // size, -(-(first + length) // size))
        for first, length, size in zip(start, shape, block, strict=True)
    )
    return rows, columns


def dequantized(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], start: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Multiply each block of a weight [R, C] by its scale [R / block, C / block]; bfloat16.

    `start`: where in the first of the blocks the weight begins, for a part of one. Raises ValueError where the scales
    are not those of its blocks.
    """
    inner = [first % size for first, size in zip(start, block, strict=True)]
    ends = [first + length for first, length in zip(inner, weight.shape, strict=True)]
    wanted = tuple(-(-end // size) for end, size in zip(ends, block, strict=True))
    if tuple(scales.shape) != wanted:
        raise ValueError(f"a weight of {tuple(weight.shape)} has {wanted} blocks, and scales of {tuple(scales.shape)}")
    wide = scales.float()
    for dim, size in enumerate(block):
        wide = wide.repeat_interleave(size, dim).narrow(dim, inner[dim], weight.shape[dim])
    return (weight.float() * wide).to(torch.bfloat16)
