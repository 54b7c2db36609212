"""Sampling in a step: which prompts, and as often as it takes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from spmd_rl.algorithms.curation import group_fractions
from spmd_rl.algorithms.table import Curation
from spmd_rl.config.config import Config
from spmd_rl.controller.batch import Batch
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import SampleReward, Ticket


class Rollout:
    """Sample prompts while vLLM holds the device; ids go on from one call to the next within a step."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        step: int,
        take_prompts: Callable[[int], list[int]],
        keep_prompts: Callable[[list[int]], None],
    ):
        """`keep_prompts`: is given rows that the next step shall begin with."""
        self.config, self.ranks, self.step = config, ranks, step
        self.take_prompts, self.keep_prompts = take_prompts, keep_prompts
        self.sampling = SamplingParams.of(config.rollout)
        self.metrics: list[dict[str, float]] = []
        """Of each call."""
        self._rows: dict[int, int] = {}
        """Of each group."""
        self.scored: dict[int, SampleReward] = {}
        """Rewards that were asked for to see whether to sample on, by id."""
        self._next_id = 0

    def fill(self, curate: Curation) -> list[Ticket]:
        """Return samples of the next prompts, and of further ones until train.prompts_per_step groups are kept.

        Each time algorithm.refill_oversample prompts are taken for each group that is missing; what is kept beyond
        the wanted groups, the last ones, is left over. After algorithm.refill_attempts times there may be fewer;
        RuntimeError where there is none at all.
        """
        algorithm, wanted = self.config.algorithm, self.config.train.prompts_per_step
        attempts = algorithm.refill_attempts
        tickets = self.generate()
        for attempt in range(attempts + 1 if attempts else 0):
            scored, grading = self.ranks.rewards()
            self.scored |= scored
            batch = Batch(tickets, self.scored)
            batch.keep(curate(batch.groups, batch.rewards))
            kept = list(dict.fromkeys(ticket.group for ticket in batch.to_train()))
            self.metrics += [grading, {"rollout/refills": attempt, "rollout/samples": len(tickets)}]
            if len(kept) >= wanted:
                return self._without(kept[wanted:], tickets)
            if attempt < attempts:
                tickets += self.generate(math.ceil((wanted - len(kept)) * algorithm.refill_oversample))
            elif not kept:
                raise RuntimeError(self._nothing_teaches(batch))
        return tickets

    def _without(self, left_over: Sequence[int], tickets: list[Ticket]) -> list[Ticket]:
        """Return the samples of other groups than these, whose prompts the next step begins with, where asked to."""
        rows = [self._rows.pop(group) for group in left_over]
        if self.config.algorithm.refill_leftover == "keep":
            self.keep_prompts(rows)
        return [ticket for ticket in tickets if ticket.group not in left_over]

    def _nothing_teaches(self, batch: Batch) -> str:
        fractions, prompts = group_fractions(batch.groups, batch.kept, batch.correct), len(self._rows)
        right, wrong = (fractions.get(f"groups/all_{kind}_fraction", 0.0) * prompts for kind in ("correct", "wrong"))
        return (
            f"algorithm.refill_attempts = {self.config.algorithm.refill_attempts}: none of the {prompts} prompts that "
            f"step {self.step + 1} sampled teaches: {right:.0f} are answered right by all samples, {wrong:.0f} wrong "
            "by all; take easier or harder prompts, more samples a prompt, or 0 to go on without refilling"
        )

    def generate(self, prompts: int | None = None) -> list[Ticket]:
        """Return samples of the next prompts, train.prompts_per_step unless told; each is graded as it ends."""
        rows = self.take_prompts(prompts or self.config.train.prompts_per_step)
        tickets = self._ask(rows, self.config.algorithm.samples_per_prompt, self.sampling)
        self._rows |= zip(dict.fromkeys(ticket.group for ticket in tickets), rows, strict=True)
        return tickets

    def generate_greedy(self) -> list[Ticket]:
        """Return one greedy response to each prompt sampled so far, in the group of its samples; graded as they are."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        tickets = self._ask(list(self._rows.values()), 1, greedy)
        return [replace(ticket, group=group) for ticket, group in zip(tickets, self._rows, strict=True)]

    def _ask(self, rows: Sequence[int], count: int, sampling: SamplingParams) -> list[Ticket]:
        first = -(-self._next_id // count) * count  # a group's ids begin with a multiple of its size
        tickets, metrics = self.ranks.generate("train", rows, self.step, count, sampling, first)
        self.metrics.append(metrics)
        self._next_id = first + len(rows) * count
        return tickets
