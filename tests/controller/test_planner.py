"""Laws of the plan: every sample once, no micro-batch over budget, equal counts on all ranks, and about equal work."""

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
            tickets.append(Ticket(prompt * 9 + sample, prompt, sample, 0, length, draw(st.integers(1, 200)), "stop"))
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
                    assert len({by_id[i].prompt for i in group}) == 1
                used = sum(
                    by_id[group[0]].prompt_tokens * (1 if share else len(group))
                    + sum(by_id[i].response_tokens - 1 for i in group)
                    for group in batch
                )
                assert used <= BUDGET
    assert sorted(seen) == sorted(by_id)
    prompts = [{by_id[i].prompt for i in minibatch.ids} for minibatch in plan.minibatches]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "a prompt is in two mini-batches"


def test_work_is_balanced_over_the_data_parallel_ranks():
    tickets = [
        Ticket(p * 8 + s, p, s, 0, 50, 10 + 17 * ((p * 5 + s) % 11), "stop") for p in range(32) for s in range(8)
    ]
    loads = plan_microbatches(tickets, 4, 1, 4096, True).laid_tokens(tickets)
    assert max(loads) < 1.02 * min(loads)


def test_one_prompt_is_split_so_that_no_rank_idles():
    tickets = [Ticket(s, 0, s, 0, 50, 20, "stop") for s in range(8)]
    plan = plan_microbatches(tickets, 4, 1, 4096, True)
    assert [sum(len(g) for b in batches for g in b) for batches in plan.minibatches[0].microbatches] == [2, 2, 2, 2]


def test_nothing_to_train_on_is_an_empty_plan():
    assert plan_microbatches([], 2, 3, BUDGET, True).minibatches == []
