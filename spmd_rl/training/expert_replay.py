"""Send tokens to the experts that vLLM sent them to when it wrote them: router replay (https://arxiv.org/abs/2510.11370).

Where a token's best experts are nearly equal, rounding decides, and the trainer's choice is another than vLLM's: its
log-probability then comes from other weights. A layer takes the choices of the micro-batch that it is called with, also
when it is computed a second time for the backward pass, so that the order of micro-batches does not matter.
"""

from collections.abc import Callable, Sequence

import torch

from spmd_rl.distributed.sample import Sample

FIELD = "routed_experts"
"""A sample's field: of each token but the last, in each layer, the chosen experts [L - 1, layers, k]."""


class ExpertChoices:
    """Hold the experts of the tokens that a router sees next; Megatron's router asks it for the best of its scores."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        """[T, k]; None: the router chooses."""

    def take(self, choices: torch.Tensor | None, layer: int, tokens: int, rank: int) -> None:
        """Take a layer's from a micro-batch's [C, layers, k]; with sequence parallel a rank has T of C tokens."""
        if choices is not None:
            first = tokens * rank if tokens < len(choices) else 0
            choices = choices[first : first + tokens, layer]
        self.given = choices

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        k: int,
        groups: int | None = None,
        groups_of_token: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.topk,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the experts, and the experts, of each token [T, k]; Megatron's name."""
        if self.given is None:
            return default_compute_topk(scores, k, num_groups=groups, group_topk=groups_of_token)
        chosen = self.given.long()
        return scores.gather(1, chosen), chosen


def choices_of(laid: Sequence[tuple[Sample | None, slice]], chunk: slice, device: torch.device) -> torch.Tensor | None:
    """Return the experts of a chunk of packed tokens [C, layers, k], where the samples say them.

    `laid`: which tokens of which sample lie one after another; None stands for padding, for the first experts.
    """
    kept = [sample.fields.get(FIELD) for sample, _ in laid if sample is not None]
    if not kept or any(one is None for one in kept):
        return None
    like = kept[0]
    first = torch.arange(like.shape[2], dtype=like.dtype)
    parts = [
        first.expand(part.stop, *like.shape[1:]) if sample is None else sample.fields[FIELD][part]
        for sample, part in laid
    ]
    return torch.cat(parts)[chunk].to(device)
