"""Which rank trains on which samples, in which micro-batches: plain arithmetic on lengths that rank 0 knows.

The unit is a group of samples of one prompt: laid out together, the prompt is computed once (training/packing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.data.tickets import Ticket

Group = list[int]
"""Ids of samples of one prompt that are laid out together."""
MicroBatch = list[Group]


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step."""

    microbatches: list[list[MicroBatch]]
    """[data-parallel rank][micro-batch]: every rank has equally many, the last ones may be empty."""
    ids: list[int]


@dataclass(frozen=True)
class Plan:
    """What every rank does with the samples of one rollout."""

    minibatches: list[MiniBatch]
    share_prompts: bool

    def laid_tokens(self, tickets: Sequence[Ticket]) -> list[int]:
        """Tokens that each data-parallel rank lays down in all its micro-batches."""
        by_id = {ticket.id: ticket for ticket in tickets}
        return [
            sum(
                _tokens([by_id[i] for i in group], self.share_prompts)
                for minibatch in self.minibatches
                for batch in minibatch.microbatches[rank]
                for group in batch
            )
            for rank in range(len(self.minibatches[0].microbatches))
        ]


def plan_microbatches(
    tickets: Sequence[Ticket], data_parallel: int, minibatches: int, budget_tokens: int, share_prompts: bool
) -> Plan:
    """Deal the samples of a rollout to mini-batches, data-parallel ranks and micro-batches.

    Mini-batches hold whole prompts, in order. Within one, the ranks get about the same number of tokens, no micro-batch
    more than `budget_tokens`, and every rank the same number of micro-batches.
    """
    prompts = sorted({ticket.prompt for ticket in tickets})
    count = min(minibatches, len(prompts))
    groups: dict[int, list[Ticket]] = {prompt: [] for prompt in prompts}
    for ticket in sorted(tickets, key=lambda ticket: ticket.id):
        groups[ticket.prompt].append(ticket)
    plans = []
    for index in range(count):
        part = prompts[len(prompts) * index // count : len(prompts) * (index + 1) // count]
        units = [unit for prompt in part for unit in _within_budget(groups[prompt], budget_tokens, share_prompts)]
        units = _at_least(units, data_parallel)
        ranks = _spread(units, data_parallel, share_prompts)
        batches = [_first_fit(units, budget_tokens, share_prompts) for units in ranks]
        most = max(len(batch) for batch in batches)
        plans.append(
            MiniBatch(
                microbatches=[
                    _ids(_equalised(units, batch, most, budget_tokens, share_prompts))
                    for units, batch in zip(ranks, batches, strict=True)
                ],
                ids=[ticket.id for prompt in part for ticket in groups[prompt]],
            )
        )
    return Plan(plans, share_prompts)


def _tokens(unit: Sequence[Ticket], share_prompts: bool) -> int:
    """Tokens laid down for a unit; a response's last token predicts nothing and is left out."""
    prompts = unit[0].prompt_tokens * (1 if share_prompts else len(unit))
    return prompts + sum(ticket.response_tokens - 1 for ticket in unit)


def _within_budget(group: list[Ticket], budget: int, share: bool) -> list[list[Ticket]]:
    """The group in as few units as fit the budget, of about the same size; the prompt is repeated in each."""
    for parts in range(1, len(group) + 1):
        units = [group[len(group) * i // parts : len(group) * (i + 1) // parts] for i in range(parts)]
        if all(_tokens(unit, share) <= budget for unit in units):
            return units
    return [[ticket] for ticket in group]


def _at_least(units: list[list[Ticket]], count: int) -> list[list[Ticket]]:
    """At least `count` units, so that no rank idles while another has two samples."""
    units = list(units)
    while len(units) < count:
        largest = max(units, key=len)
        if len(largest) < 2:
            break
        units.remove(largest)
        half = len(largest) // 2
        units += [largest[:half], largest[half:]]
    return units


def _spread(units: list[list[Ticket]], bins: int, share: bool) -> list[list[list[Ticket]]]:
    """Longest first, each to the bin that has least."""
    spread: list[list[list[Ticket]]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for unit in sorted(units, key=lambda unit: (-_tokens(unit, share), unit[0].id)):
        lightest = min(range(bins), key=lambda i: (loads[i], i))
        spread[lightest].append(unit)
        loads[lightest] += _tokens(unit, share)
    return spread


def _first_fit(units: list[list[Ticket]], budget: int, share: bool) -> list[list[list[Ticket]]]:
    """Few bins within the budget: longest first, each into the first that has room."""
    bins: list[list[list[Ticket]]] = []
    for unit in sorted(units, key=lambda unit: (-_tokens(unit, share), unit[0].id)):
        for batch in bins:
            if sum(_tokens(other, share) for other in batch) + _tokens(unit, share) <= budget:
                batch.append(unit)
                break
        else:
            bins.append([unit])
    return bins


def _equalised(
    units: list[list[Ticket]], batches: list[list[list[Ticket]]], count: int, budget: int, share: bool
) -> list[list[list[Ticket]]]:
    """Exactly `count` micro-batches: evenly filled where that keeps the budget, else with empty ones at the end."""
    even = _spread(units, count, share)
    if all(sum(_tokens(unit, share) for unit in batch) <= budget for batch in even):
        return sorted(even, key=lambda batch: not batch)
    return batches + [[] for _ in range(count - len(batches))]


def _ids(batches: list[list[list[Ticket]]]) -> list[MicroBatch]:
    return [[[ticket.id for ticket in unit] for unit in batch] for batch in batches]
