"""The critic's loss over a micro-batch, from the fields of its samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spmd_rl.training.learner import LossResult
from spmd_rl.training.packing import Packed


@dataclass(frozen=True)
class ValueLoss:
    """Reads weights, returns, and the values before the update."""

    token_loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Of algorithms/table.py."""

    def __call__(self, packed: Packed, values: torch.Tensor) -> LossResult:
        weights, before, returns = (packed.field(name) for name in ("weights", "values", "returns"))  # each [N]
        loss, clipped = self.token_loss(values, before, returns)
        return LossResult(
            total=(weights * loss).sum(),
            sums={
                "tokens": torch.ones_like(values).sum(),
                "critic/vf_loss": (weights * loss).detach().sum(),
                "critic/vf_clipfrac": clipped.to(values.dtype).sum(),
            },
            losses=(weights * loss).detach(),
        )
