"""Passes of the model over micro-batches, through Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from spmd_rl.distributed.status import set_status
from spmd_rl.training.context import of_all_tokens
from spmd_rl.training.model import PolicyModel
from spmd_rl.training.packing import Packed
from spmd_rl.training.parallel import Place
from spmd_rl.training.token_logprobs import token_logprobs

Loss = Callable[[Packed, torch.Tensor, torch.Tensor], torch.Tensor]
"""(micro-batch, logprobs [N], entropy [N]) -> the sum of the micro-batch's weighted token losses."""
ValueLoss = Callable[[Packed, torch.Tensor], torch.Tensor]
"""(micro-batch, values [N, labels]) -> the sum of the micro-batch's weighted token losses."""


def run_passes(
    model: Sequence[torch.nn.Module],
    policy: PolicyModel,
    place: Place,
    microbatches: list[Packed],
    vocabulary: int,
    temperature: float,
    chunk: int,
    use: Loss,
    backward: bool,
) -> None:
    """One pass over all micro-batches; `use` sees each one's log-probabilities on the last pipeline stage.

    `model` is what the schedule drives (the policy's chunks, or those wrapped for gradients). With `backward`, the
    gradients of the sum of what `use` returns, over all ranks, are left in the model's gradient buffers.
    """
    last = policy.last
    rows = last.vocab_size // place.tensor_size
    first_row = place.tensor_rank * rows
    real_rows = max(0, min(rows, vocabulary - first_row))

    def loss(packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
        # gather_hidden is a collective of the tensor group: a micro-batch without samples takes part in it.
        rows_of_hidden = last.gather_hidden(hidden).index_select(0, packed.predictors)
        logprobs, entropy = token_logprobs(
            rows_of_hidden,
            last.output_weight()[:real_rows],
            packed.targets,
            temperature,
            first_row,
            place.tensor_group,
            chunk,
        )
        if place.context_size > 1:
            own, count = torch.stack((logprobs, entropy)), sum(packed.lengths)
            logprobs, entropy = of_all_tokens(own, packed.places, count, place.context_group)
        return use(packed, logprobs, entropy)

    _drive(model, microbatches, loss, backward)


def run_values(
    model: Sequence[torch.nn.Module],
    scorer: PolicyModel,
    place: Place,
    microbatches: list[Packed],
    use: ValueLoss,
    backward: bool,
) -> None:
    """run_passes for a model with a value head: `use` sees the values of the tokens that predict response tokens.

    That is, of the state before each response token; see training/packing.py.
    """

    def loss(packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
        values = scorer.last.value_head(hidden).index_select(0, packed.predictors)
        if place.context_size > 1:
            values = of_all_tokens(values.T, packed.places, sum(packed.lengths), place.context_group).T
        return use(packed, values)

    _drive(model, microbatches, loss, backward)


def _drive(
    model: Sequence[torch.nn.Module],
    microbatches: list[Packed],
    loss: Callable[[Packed, torch.Tensor], torch.Tensor],
    backward: bool,
) -> None:
    """All micro-batches through Megatron's schedule; `loss` sees the hidden states of the last stage."""

    begun, passes = 0, len(microbatches) * len(model)

    def step(packs: Iterator[Packed], layers: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        nonlocal begun
        begun += 1
        set_status(doing=f"micro-batch {begun} of {passes}")
        packed = next(packs)
        output = layers(packed.tokens, None, None, packed_seq_params=packed.params)

        def of_hidden(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return loss(packed, hidden), torch.zeros((), dtype=torch.int, device=hidden.device), {}

        return output, of_hidden

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in model],
        model=list(model),
        num_microbatches=len(microbatches),
        # Only read when every micro-batch has the same length; the stages tell each other the lengths.
        seq_length=max(packed.tokens.shape[1] for packed in microbatches),
        micro_batch_size=1,
        forward_only=not backward,
    )
    set_status(doing="")
