"""Count the operations of a model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spmd_rl.estimate.micro_batch import MicroBatch
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.weights.families import hf_tensors


@dataclass(frozen=True)
class Work:
    """Count the operations of a model, by token."""

    shape: ModelShape
    total: int
    """Parameters."""
    head: int
    """Of these in the layer over the vocabulary."""
    active: int
    """Parameters of the layers that one token uses."""
    routed: int
    """Of `total` in experts that a router chooses from."""

    @classmethod
    def of(cls, shape: ModelShape) -> "Work":
        """Return it for a model."""
        tensors = hf_tensors(shape)
        total = sum(map(math.prod, tensors.values()))
        vocabulary = shape.vocabulary * shape.hidden
        layers = _elements(size for name, size in tensors.items() if ".layers." in name and ".experts." not in name)
        experts = shape.experts
        each = 3 * experts.ffn * shape.hidden * sum(experts.sparse) if experts else 0
        used, routed = (each * experts.per_token, each * experts.count) if experts else (0, 0)
        return cls(shape, total, vocabulary if shape.head == "lm" else 0, layers + used, routed)

    def forward(self, batch: MicroBatch) -> float:
        """Return the operations of a forward pass: 2 a parameter that a token uses, 4 a channel and pair of attention;
        the head where tokens are predicted."""
        channels = self.shape.heads * self.shape.head_dim
        attention = 4 * self.shape.layers * channels * batch.pairs
        return 2 * self.active * batch.tokens + attention + 2 * self.head * batch.loss_tokens


def _elements(sizes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, sizes))
