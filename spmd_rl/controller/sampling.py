"""Sampling in a step: which prompts, and as often as it takes."""

from collections.abc import Callable

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
        self._next_id = 0

    def generate(self, prompts: int | None = None) -> list[Ticket]:
        """Return samples of the next prompts, train.prompts_per_step unless told; each is graded as it ends."""
        rows = self.take_prompts(prompts or self.config.train.prompts_per_step)
        count = self.config.algorithm.samples_per_prompt
        tickets, metrics = self.ranks.generate("train", rows, self.step, count, self.sampling, self._next_id)
        self.metrics.append(metrics)
        self._next_id += len(rows) * count
        return tickets
