"""The estimate's micro-batches against the planner's, for samples that are all alike."""

from dataclasses import replace

import pytest

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.data.tickets import Ticket
from spmd_rl.estimate.micro_batch import Lengths, MicroBatch, full, split


def config(prompts, samples, budget, share=True, most=None):
    base = Config(ModelConfig("anywhere"))
    return replace(
        base,
        algorithm=replace(base.algorithm, samples_per_prompt=samples),
        train=replace(
            base.train,
            prompts_per_step=prompts,
            tokens_per_microbatch=budget,
            share_prompts=share,
            sequences_per_microbatch=most,
        ),
    )


@pytest.mark.parametrize(
    ("prompts", "samples", "data", "budget", "share"),
    [(8, 8, 2, 400, True), (8, 8, 2, 4096, True), (8, 8, 2, 256, True), (16, 4, 4, 300, False), (2, 8, 4, 500, True)],
)
def test_samples_of_one_length_are_laid_out_as_the_planner_does(prompts, samples, data, budget, share):
    lengths = Lengths(45, 25)
    found = split(config(prompts, samples, budget, share), data, lengths)
    tickets = [
        Ticket(
            id=number,
            group=number // samples,
            prompt_tokens=45,
            response_tokens=25,
            loss_tokens=25,
            finish_reason="stop",
        )
        for number in range(prompts * samples)
    ]
    planned = plan_microbatches(tickets, data, 1, budget, share).minibatches[0].microbatches
    assert found.count == max(map(len, planned))
    batches = [batch for rank in planned for batch in rank]
    laid = max(sum(45 * (1 if share else len(group)) + 24 * len(group) for group in batch) for batch in batches)
    assert found.batch.tokens == pytest.approx(laid, rel=0.35) and found.batch.tokens <= budget


def test_a_micro_batch_counts_what_it_lays_out_predicts_and_sees():
    batch = MicroBatch(2, 4, Lengths(10, 5), shared=True)
    assert (batch.tokens, batch.loss_tokens) == (2 * (10 + 4 * 4), 2 * 4 * 5)
    assert batch.pairs == 2 * (50 + 4 * (4 * 10 + 8))
    apart = replace(batch, shared=False)
    assert apart.tokens == 8 * 14 and apart.pairs > batch.pairs


def test_memory_has_to_suffice_for_a_micro_batch_that_is_full():
    several = split(config(16, 8, 500), 2, Lengths(45, 25))
    assert several.count > 1 and full(several, 500).tokens == pytest.approx(500)
    one = split(config(2, 2, 5000), 2, Lengths(45, 25))
    assert one.count == 1 and full(one, 5000).tokens == one.batch.tokens
