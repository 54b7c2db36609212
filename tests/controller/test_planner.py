"""Laws of the plan: every sample once, no micro-batch over budget, equal counts on all ranks, and about equal work."""

import cProfile
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.data.tickets import Ticket

BUDGET = 400


@st.composite
def rollouts(draw):
    """Prompts of up to 100 tokens with up to 9 responses of up to 200."""
    tickets = []
    for prompt in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, 100))
        for sample in range(draw(st.integers(1, 9))):
            response = draw(st.integers(1, 200))
            tickets.append(Ticket(prompt * 9 + sample, prompt, length, response, response, "stop"))
    return tickets


@settings(max_examples=300, deadline=None)
@given(rollouts(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_plan_holds_every_sample_once_within_the_budget(tickets, data_parallel, minibatches, share):
    plan = plan_microbatches(tickets, data_parallel, minibatches, BUDGET, share)
    by_id = {ticket.id: ticket for ticket in tickets}
    seen = []
    for minibatch in plan.minibatches:
        assert len(minibatch.microbatches) == data_parallel
        assert len({len(batches) for batches in minibatch.microbatches}) == 1
        placed = [i for batches in minibatch.microbatches for batch in batches for group in batch for i in group]
        assert sorted(placed) == sorted(minibatch.ids)
        seen += placed
        for batches in minibatch.microbatches:
            for batch in batches:
                for group in batch:
                    assert len({by_id[i].group for i in group}) == 1
                used = sum(
                    by_id[group[0]].prompt_tokens * (1 if share else len(group))
                    + sum(by_id[i].response_tokens - 1 for i in group)
                    for group in batch
                )
                assert used <= BUDGET
    assert sorted(seen) == sorted(by_id)
    prompts = [{by_id[i].group for i in minibatch.ids} for minibatch in plan.minibatches]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "a prompt is in two mini-batches"


@settings(max_examples=100, deadline=None)
@given(rollouts(), st.data(), st.integers(1, 5), st.integers(40, 300))
def test_patches_have_a_budget_too_which_only_a_prompt_with_more_exceeds_by_itself(tickets, data, ranks, budget):
    shown = {group: data.draw(st.sampled_from([0, 16, 64, 200])) for group in {ticket.group for ticket in tickets}}
    seeing = [replace(ticket, patches=shown[ticket.group]) for ticket in tickets]
    plan = plan_microbatches(seeing, ranks, 1, BUDGET, True, budget)
    by_id = {ticket.id: ticket for ticket in seeing}
    [minibatch] = plan.minibatches
    assert sorted(i for rank in minibatch.microbatches for batch in rank for group in batch for i in group) == sorted(
        by_id
    )
    for batch in (batch for rank in minibatch.microbatches for batch in rank):
        assert len(batch) <= 1 or sum(by_id[group[0]].patches for group in batch) <= budget
    assert plan_microbatches(tickets, ranks, 1, BUDGET, True, budget) == plan_microbatches(
        tickets, ranks, 1, BUDGET, True
    )


def plainly(tickets, data_parallel, minibatches, budget, share):
    """The same plan by looking at every bin for every unit: [mini-batch][rank][micro-batch][group][id]."""

    def tokens(unit):
        return unit[0].prompt_tokens * (1 if share else len(unit)) + sum(t.response_tokens - 1 for t in unit)

    def parted(group, parts):
        return [group[len(group) * i // parts : len(group) * (i + 1) // parts] for i in range(parts)]

    def spread(units, count):
        bins = [[] for _ in range(count)]
        for unit in sorted(units, key=lambda unit: (-tokens(unit), unit[0].id)):
            min(bins, key=lambda one: sum(map(tokens, one))).append(unit)
        return bins

    def first_fit(units):
        bins = []
        for unit in sorted(units, key=lambda unit: (-tokens(unit), unit[0].id)):
            room = [one for one in bins if sum(map(tokens, one)) + tokens(unit) <= budget]
            if not room:
                bins.append(room := [])
                room = [bins[-1]]
            room[0].append(unit)
        return bins

    prompts = sorted({t.group for t in tickets})
    plan = []
    for part in parted(prompts, min(minibatches, len(prompts))) if prompts else []:
        units = []
        for prompt in part:
            group = sorted((t for t in tickets if t.group == prompt), key=lambda t: t.id)
            ways = (parted(group, parts) for parts in range(1, len(group) + 1))
            units += next((w for w in ways if all(tokens(u) <= budget for u in w)), [[t] for t in group])
        while len(units) < data_parallel and len(largest := max(units, key=len)) > 1:
            units.remove(largest)
            units += parted(largest, 2)
        ranks = spread(units, data_parallel)
        most = max(len(first_fit(units)) for units in ranks)
        plan.append([])
        for units in ranks:
            even, few = spread(units, most), first_fit(units)
            fits = all(sum(map(tokens, one)) <= budget for one in even)
            batches = sorted(even, key=lambda one: not one) if fits else few + [[] for _ in range(most - len(few))]
            plan[-1].append([[[t.id for t in unit] for unit in one] for one in batches])
    return plan


@settings(max_examples=300, deadline=None)
@given(rollouts(), st.integers(1, 5), st.integers(1, 4), st.sampled_from([90, 150, 400, 1200]), st.booleans())
def test_the_plan_is_the_one_that_looking_at_every_bin_finds(tickets, data_parallel, minibatches, budget, share):
    plan = plan_microbatches(tickets, data_parallel, minibatches, budget, share)
    found = [minibatch.microbatches for minibatch in plan.minibatches]
    assert found == plainly(tickets, data_parallel, minibatches, budget, share)


def calls_to_plan(samples: int, data_parallel: int) -> int:
    """Return how many calls planning makes, Python's own functions included."""
    rng = random.Random(1)
    tickets = [Ticket(i, i // 16, 50 + i // 16 % 750, rng.randint(20, 8000), 20, "stop") for i in range(samples)]
    with cProfile.Profile() as profile:
        plan_microbatches(tickets, data_parallel, 1, 16384, True)
    return sum(entry.callcount for entry in profile.getstats())


def test_planning_makes_calls_about_in_proportion_to_the_samples():
    """Looking at every bin for each sample would make sixteen times as many."""
    assert calls_to_plan(16_384, 256) < 5 * calls_to_plan(4_096, 64)


def test_work_is_balanced_over_the_data_parallel_ranks():
    tickets = [Ticket(p * 8 + s, p, 50, 10 + 17 * ((p * 5 + s) % 11), 9, "stop") for p in range(32) for s in range(8)]
    plan = plan_microbatches(tickets, 4, 1, 4096, True)
    response = {ticket.id: ticket.response_tokens - 1 for ticket in tickets}
    loads = [
        sum(50 + sum(response[i] for i in group) for batch in batches for group in batch)
        for batches in plan.minibatches[0].microbatches
    ]
    assert max(loads) < 1.02 * min(loads)


def test_one_prompt_is_split_so_that_no_rank_idles():
    tickets = [Ticket(s, 0, 50, 20, 20, "stop") for s in range(8)]
    plan = plan_microbatches(tickets, 4, 1, 4096, True)
    assert [sum(len(g) for b in batches for g in b) for batches in plan.minibatches[0].microbatches] == [2, 2, 2, 2]


def test_nothing_to_train_on_is_an_empty_plan():
    assert plan_microbatches([], 2, 3, BUDGET, True).minibatches == []


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_microbatch_has_more_samples_than_it_may(most, share):
    tickets = [Ticket(i, i // 4, 10, 3 + i % 5, 3 + i % 5, "stop") for i in range(24)]
    plan = plan_microbatches(tickets, 2, 2, 1000, share, most_samples=most)
    assert sorted(i for minibatch in plan.minibatches for i in minibatch.ids) == list(range(24))
    for minibatch in plan.minibatches:
        assert len({len(batches) for batches in minibatch.microbatches}) == 1
        batches = [batch for rank in minibatch.microbatches for batch in rank]
        assert max(sum(map(len, batch)) for batch in batches) <= most
        assert sorted(i for batch in batches for group in batch for i in group) == sorted(minibatch.ids)
        # Nearly full: a cap makes no more passes than it must, beyond one a rank.
        assert len(minibatch.microbatches[0]) <= -(-len(minibatch.ids) // 2 // most) + 2
