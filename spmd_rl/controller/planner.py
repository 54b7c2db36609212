"""Which rank trains on which samples, in which micro-batches: plain arithmetic on lengths that rank 0 knows.

The unit is a group of samples of one prompt: laid out together, the prompt is computed once (training/packing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from math import ceil
from operator import attrgetter
from typing import NamedTuple

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
    """State what every rank does with the samples of one rollout."""

    minibatches: list[MiniBatch]
    share_prompts: bool


class _Unit(NamedTuple):
    """Samples of one prompt that are not parted any more."""

    tokens: int
    """Laid down for it; a response's last token predicts nothing and is left out. More where its patches take more of
    their budget than that is of the tokens'."""
    tickets: list[Ticket]


def plan_microbatches(
    tickets: Sequence[Ticket],
    data_parallel: int,
    minibatches: int,
    budget_tokens: int,
    share_prompts: bool,
    budget_patches: int | None = None,
    most_samples: int | None = None,
) -> Plan:
    """Deal the samples of a rollout to mini-batches, data-parallel ranks and micro-batches.

    Mini-batches hold whole prompts, in order. Within one, the ranks get about the same number of tokens, no micro-batch
    more than `budget_tokens` or `most_samples`, and every rank the same number of micro-batches. `budget_patches`: a
    micro-batch of several units shows no more of them; a unit with more is alone.
    """
    scale = budget_tokens / budget_patches if budget_patches else 0.0
    groups: dict[int, list[Ticket]] = {}
    for ticket in sorted(tickets, key=attrgetter("id")):
        groups.setdefault(ticket.group, []).append(ticket)
    prompts = sorted(groups)
    count = min(minibatches, len(prompts))
    plans = []
    for index in range(count):
        part = prompts[len(prompts) * index // count : len(prompts) * (index + 1) // count]
        units = [
            unit for prompt in part for unit in _within_budget(groups[prompt], budget_tokens, share_prompts, scale)
        ]
        if most_samples is not None:
            units = [cut for unit in units for cut in _cut(unit, most_samples, share_prompts, scale)]
        ranks = _spread(_longest_first(_at_least(units, data_parallel, share_prompts, scale)), data_parallel)
        batches = [_first_fit(units, budget_tokens) for units in ranks]
        if most_samples is not None:
            batches = [[b for batch in bins for b in _parted(batch, most_samples)] for bins in batches]
        most = max(len(batch) for batch in batches)
        plans.append(
            MiniBatch(
                microbatches=[
                    _ids(_equalised(units, batch, most, budget_tokens, most_samples))
                    for units, batch in zip(ranks, batches, strict=True)
                ],
                ids=[ticket.id for prompt in part for ticket in groups[prompt]],
            )
        )
    return Plan(plans, share_prompts)


def _unit(tickets: list[Ticket], share: bool, scale: float) -> _Unit:
    """`scale`: what a patch counts for, in tokens."""
    prompts = tickets[0].prompt_tokens * (1 if share else len(tickets))
    tokens = prompts + sum([ticket.response_tokens for ticket in tickets]) - len(tickets)
    return _Unit(max(tokens, ceil(scale * tickets[0].patches)), tickets)


def _within_budget(group: list[Ticket], budget: int, share: bool, scale: float) -> list[_Unit]:
    """Part the group into as few units as fit the budget, of about the same size; each repeats the prompt."""
    size = len(group)
    before = list(accumulate([ticket.response_tokens - 1 for ticket in group], initial=0))
    for parts in range(1, size):
        ends = [size * part // parts for part in range(parts + 1)]
        tokens = [
            group[start].prompt_tokens * (1 if share else end - start) + before[end] - before[start]
            for start, end in pairwise(ends)
        ]
        if max(tokens) <= budget:
            return [_unit(group[start:end], share, scale) for start, end in pairwise(ends)]
    return [_unit([ticket], share, scale) for ticket in group]


def _cut(unit: _Unit, most: int, share: bool, scale: float) -> list[_Unit]:
    """Part a unit into such of `most` samples."""
    tickets = unit.tickets
    return [_unit(tickets[at : at + most], share, scale) for at in range(0, len(tickets), most)]


def _parted(batch: list[_Unit], most: int) -> list[list[_Unit]]:
    """Part a micro-batch into such of `most` samples; none of its units has more."""
    parts: list[list[_Unit]] = []
    for unit in batch:
        if not parts or sum(len(one.tickets) for one in parts[-1]) + len(unit.tickets) > most:
            parts.append([])
        parts[-1].append(unit)
    return parts


def _at_least(units: list[_Unit], count: int, share: bool, scale: float) -> list[_Unit]:
    """Halve the largest until there are `count` units, so that no rank idles while another has two samples."""
    if len(units) >= count:
        return units
    largest = [(-len(unit.tickets), number, unit) for number, unit in enumerate(units)]
    heapify(largest)
    made = len(largest)
    while len(largest) < count and -largest[0][0] > 1:
        _, _, unit = heappop(largest)
        half = len(unit.tickets) // 2
        for tickets in (unit.tickets[:half], unit.tickets[half:]):
            heappush(largest, (-len(tickets), made, _unit(tickets, share, scale)))
            made += 1
    return [unit for _, _, unit in largest]


def _longest_first(units: list[_Unit]) -> list[_Unit]:
    return sorted(units, key=lambda unit: (-unit[0], unit[1][0].id))


def _spread(units: list[_Unit], bins: int) -> list[list[_Unit]]:
    """Deal units, longest first, each to the first of the bins that have least."""
    spread: list[list[_Unit]] = [[] for _ in range(bins)]
    loads = [(0, number) for number in range(bins)]  # a heap, as sorted numbers are
    for unit in units:
        load, lightest = loads[0]
        spread[lightest].append(unit)
        heapreplace(loads, (load + unit.tokens, lightest))
    return spread


def _first_fit(units: list[_Unit], budget: int) -> list[list[_Unit]]:
    """Fill few bins within the budget: units come longest first, each goes into the first bin that has room.

    `room` is a tournament tree: a node holds the most room of its children 2 i and 2 i + 1; the leaves are the bins.
    """
    # Any two bins hold more than the budget together, or the second's first unit would be in the first.
    most = min(len(units), 2 * sum(unit.tokens for unit in units) // budget + 2)
    leaves = 1 << max(most - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    bins: list[list[_Unit]] = []
    for unit in units:
        tokens = unit.tokens
        node = 1 if room[1] >= tokens else leaves + len(bins)  # more than the budget: a bin of its own
        while node < leaves:
            node += node
            if room[node] < tokens:
                node += 1
        if node == leaves + len(bins):
            bins.append([])
        bins[node - leaves].append(unit)
        left = room[node] = room[node] - tokens
        while node > 1:
            left = left if left > room[node ^ 1] else room[node ^ 1]
            node >>= 1
            if room[node] == left:
                break
            room[node] = left
    return bins


def _equalised(
    units: list[_Unit], batches: list[list[_Unit]], count: int, budget: int, most: int | None
) -> list[list[_Unit]]:
    """Return exactly `count` micro-batches: evenly filled where that keeps the budget, else the last ones are empty."""
    even = _spread(units, count)
    few = most is None or all(sum(len(unit.tickets) for unit in batch) <= most for batch in even)
    if few and all(sum([unit.tokens for unit in batch]) <= budget for batch in even):
        return sorted(even, key=lambda batch: not batch)
    return batches + [[] for _ in range(count - len(batches))]


def _ids(batches: list[list[_Unit]]) -> list[MicroBatch]:
    return [[[ticket.id for ticket in unit.tickets] for unit in batch] for batch in batches]
