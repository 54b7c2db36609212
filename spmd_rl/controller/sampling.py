"""Sampling in a step: which prompts, and as often as it takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from spmd_rl.config.config import Config
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import Ticket


class Rollout:
    """Sample prompts while vLLM holds the device; ids go on from one call to the next within a step."""

    def __init__(self, config: Config, ranks: Ranks, step: int, take_prompts: Callable[[int], list[int]]):
        self.config, self.ranks, self.step, self.take_prompts = config, ranks, step, take_prompts
        self.sampling = SamplingParams.of(config.rollout)
        self.metrics: list[dict[str, float]] = []
        """Of each call."""
        self._rows: dict[int, int] = {}
        """Of each group."""
        self._next_id = 0

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
