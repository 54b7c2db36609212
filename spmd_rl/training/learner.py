"""A model in training: with gradients and an optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from spmd_rl.config.config import TrainConfig
from spmd_rl.data.answers import Learned
from spmd_rl.distributed.status import doing
from spmd_rl.training.forward import run_passes
from spmd_rl.training.offload import Releasable, gradient_buffers
from spmd_rl.training.optimizer import Optimizer, wrap_for_gradients
from spmd_rl.training.packing import Packed
from spmd_rl.training.sharded_model import ShardedModel, first_not_finite


@dataclass
class LossResult:
    """Hold what a loss says of a micro-batch that has loss tokens."""

    total: torch.Tensor
    """The sum of weight * token loss, with its gradient."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """For the log, over the loss tokens; `tokens`: how many there are."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same, of the largest of a token."""


Loss = Callable[..., LossResult]
"""(micro-batch, what the head says of its loss tokens [N], ...) -> the loss; samples' fields are read by name."""


class Learner:
    """Has a model, Megatron's gradient buffers around it, and its optimizer."""

    def __init__(self, model: ShardedModel, train: TrainConfig):
        self.model = model
        self.wrapped = wrap_for_gradients(model.module)
        self.optimizer = Optimizer(self.wrapped, train, model.dtype)
        self.gradients = Releasable(gradient_buffers(self.wrapped))
        self.gradients.release()

    def learn(self, packs: Sequence[Packed], loss: Loss, rate: float) -> Learned:
        """Make one optimizer step on these micro-batches; the loss is the sum of its totals over all ranks."""
        model, sums, maxima = self.model, dict[str, float](), dict[str, float]()
        self.gradients.restore()
        self.optimizer.zero_gradients()

        def use(packed: Packed, *rows: torch.Tensor) -> torch.Tensor:
            if not sum(packed.lengths):
                return rows[0].sum()
            result = loss(packed, *rows)
            if model.place.reports:
                for name, value in result.sums.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, value in result.maxima.items():
                    maxima[name] = max(maxima.get(name, 0.0), float(value))
            return result.total

        run_passes(self.wrapped, model.module.last, model.place, packs, model.head, use, backward=True)
        with doing("optimizer step"), self.optimizer.on_device():
            updated, grad_norm = self.optimizer.step(rate)
        learned, rank = Learned(updated, grad_norm, [sums] if sums else [], maxima), model.place.rank
        if not updated:
            if losses := [name for name, value in sums.items() if not math.isfinite(value)]:
                learned.losses_broken = [f"on rank {rank} {', '.join(losses)}"]
            gradients = ((name, weight.main_grad) for name, weight in model.module.named() if weight.requires_grad)
            if broken := first_not_finite(gradients):
                learned.gradients_broken = [f"{broken} on rank {rank}"]
        return learned

    def broken(self) -> str:
        """Return what of this rank's weights and optimizer is not finite, its first; nothing in a sound run."""
        with self.optimizer.on_device():
            return self.model.broken() or first_not_finite(self.optimizer.tensors())

    def release(self) -> None:
        """Keep nothing but the weights on the device: the optimizer waits on the host, gradients are made anew."""
        self.gradients.release()
        self.optimizer.offload()

    def offload(self) -> None:
        """Leave the device."""
        self.release()
        self.model.offload()

    def onload(self) -> None:
        """Take the device back: the weights; the gradients are zeroed before they are used."""
        self.model.onload()
