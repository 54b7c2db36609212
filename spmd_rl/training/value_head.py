"""The head of a model that scores, in place of the layer over the vocabulary: a reward model, a critic."""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """Hidden states of the last layer -> `labels` values of each token; the `score` of Hugging Face, without a bias.

    Every tensor rank has the whole weight. With sequence parallelism it values its own tokens, and only the values are
    brought together.
    """

    def __init__(self, config: TransformerConfig, labels: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(labels, config.hidden_size, dtype=config.params_dtype))
        # Each rank's gradient is then of its own tokens: Megatron sums it over the tensor ranks, as it does for norms.
        self.weight.sequence_parallel = config.sequence_parallel
        self.gathers = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T/tp or T, 1, H] of the last stage -> [T, labels], fp32, equal on all tensor ranks."""
        values = F.linear(hidden[:, 0].float(), self.weight.float())
        if self.gathers:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values
