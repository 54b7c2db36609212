"""Numbers of samples whose tokens lie one after another: [N] over all loss tokens, S samples."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum of each sample's values, [N] -> [S], differentiable; `lengths`: loss tokens of each, N in all."""
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def sequence_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean of each sample's values, [N] -> [S]; 0 for a sample without any."""
    return sequence_sums(values, lengths) / values.new_tensor([max(length, 1) for length in lengths])


def spread(numbers: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return each sample's number at every token of it, [S] -> [N]."""
    return torch.cat([number.expand(length) for number, length in zip(numbers.unbind(), lengths, strict=True)])
