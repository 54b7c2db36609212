"""Passes of a model over micro-batches, through Megatron's pipeline schedules; what is made of its hidden states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from spmd_rl.distributed.status import set_status
from spmd_rl.training.context import of_all_tokens
from spmd_rl.training.expert_balance import mask_of
from spmd_rl.training.model import ModelChunk
from spmd_rl.training.packing import Packed
from spmd_rl.training.parallel import Place
from spmd_rl.training.token_logprobs import token_logprobs

Rows = tuple[torch.Tensor, ...]
"""Of each loss token some numbers, each [N]."""


class Head(Protocol):
    """Compute numbers of loss tokens from the hidden states that predict them."""

    def __call__(self, last: ModelChunk, packed: Packed, hidden: torch.Tensor, place: Place) -> Rows:
        """[T/tp or T, 1, H] of the last stage -> numbers of the n loss tokens that this rank's chunk predicts."""
        ...


@dataclass(frozen=True)
class LogprobHead:
    """Log-probability and entropy of each loss token."""

    vocabulary: int
    temperature: float
    chunk_tokens: int
    """So many tokens' logits are in memory at a time."""

    def __call__(self, last: ModelChunk, packed: Packed, hidden: torch.Tensor, place: Place) -> Rows:
        rows = last.vocab_size // place.tensor_size
        first_row = place.tensor_rank * rows
        real_rows = max(0, min(rows, self.vocabulary - first_row))
        return token_logprobs(
            # gather_hidden is a collective of the tensor group: a micro-batch without samples takes part in it.
            last.gather_hidden(hidden).index_select(0, packed.predictors),
            last.output_weight(),
            packed.targets,
            self.temperature,
            first_row,
            place.tensor_group,
            self.chunk_tokens,
            real_rows,
        )


@dataclass(frozen=True)
class ValueOfState:
    """One value of the state before each loss token, see training/packing.py."""

    label: int = 0

    def __call__(self, last: ModelChunk, packed: Packed, hidden: torch.Tensor, place: Place) -> Rows:
        return (last.value_head(hidden).index_select(0, packed.predictors)[:, self.label],)


def run_passes(
    chunks: Sequence[torch.nn.Module],
    last: ModelChunk,
    place: Place,
    packs: Sequence[Packed],
    head: Head,
    use: Callable[..., torch.Tensor],
    backward: bool,
) -> None:
    """Make one pass over all micro-batches; on the last stage `use(packed, *rows)` sees what the head makes of each.

    `chunks` is what the schedule drives: a model's chunks, or those wrapped for gradients. With `backward`, the
    gradients of the sum of what `use` returns, over all ranks, are left in the model's gradient buffers.
    """
    begun, passes = 0, len(packs) * len(chunks)

    def loss(packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
        rows = head(last, packed, hidden, place)
        if place.context_size > 1:
            rows = of_all_tokens(torch.stack(rows), packed.places, sum(packed.lengths), place.context_group).unbind()
        return use(packed, *rows)

    def step(left: Iterator[Packed], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        nonlocal begun
        begun += 1
        set_status(doing=f"micro-batch {begun} of {passes}")
        packed = next(left)
        more = mask_of(packed, last.config) if backward else {}
        output = chunk(packed.tokens, None, None, packed_seq_params=packed.params, **more)

        def of_hidden(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return loss(packed, hidden), torch.zeros((), dtype=torch.int, device=hidden.device), {}

        return output, of_hidden

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(packs) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(packs),
        # Only read when every micro-batch has the same length; the stages tell each other the lengths.
        seq_length=max(packed.tokens.shape[1] for packed in packs),
        micro_batch_size=1,
        forward_only=not backward,
    )
    set_status(doing="")
