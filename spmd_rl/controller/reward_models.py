"""The reward models as rank 0 asks them: who scores what, and what becomes of the scores."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from spmd_rl.algorithms.score_normalization import Moments, clipped, standardized, standardized_in_groups
from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase
from spmd_rl.config.reward_config import RewardModelConfig
from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.controller.ranks import Ranks, Timed
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket


class RewardModels:
    """Adds the models' scores to those of the rules; remembers those that a normalisation over the run needs."""

    def __init__(self, config: Config, data_parallel: int, share_prompts: bool):
        self.models = config.reward.models
        self.default_budget = config.train.microbatch_tokens
        self.data_parallel, self.share_prompts = data_parallel, share_prompts
        self.seen = {name: Moments() for name, model in self.models.items() if model.normalize == "running"}

    def score(
        self, ranks: Ranks, tickets: Sequence[Ticket], scored: dict[int, SampleReward], timed: Timed
    ) -> tuple[dict[int, SampleReward], dict[str, float]]:
        """The samples' scores with those of the models, by id, and metrics; without models, nothing is done."""
        if not self.models or not tickets:
            return scored, {}
        tickets = sorted(tickets, key=lambda ticket: ticket.id)
        total = {t.id: scored.get(t.id, SampleReward(t.id, 0.0, UNJUDGED, {})) for t in tickets}
        metrics: dict[str, float] = {}
        for name, model in self.models.items():
            with timed(Phase.REWARD_MODEL):
                found, costs = self._ask(ranks, name, model, tickets)
            for metric, value in costs.items():
                metrics[metric] = metrics.get(metric, 0.0) + value
            scores = [found[ticket.id] for ticket in tickets]
            values = self._normalized(name, model, tickets, scores)
            for ticket, score, value in zip(tickets, scores, values, strict=True):
                one = total[ticket.id]
                reward = one.reward + model.weight * value
                total[ticket.id] = replace(one, reward=reward, scores={**one.scores, name: score})
        ranks.keep_rewards(total)
        return total, metrics

    def _ask(
        self, ranks: Ranks, name: str, model: RewardModelConfig, tickets: Sequence[Ticket]
    ) -> tuple[dict[int, float], dict[str, float]]:
        read = ranks.read(name)
        # As this model reads them: their lengths are its own. What the planner takes for the last token of a response
        # isn't laid down, hence one more.
        lengths = [replace(t, prompt_tokens=read[t.id][0], response_tokens=read[t.id][1] + 1) for t in tickets]
        budget = model.tokens_per_microbatch or self.default_budget
        found, costs = ranks.judge(name, plan_microbatches(lengths, self.data_parallel, 1, budget, self.share_prompts))
        broken = [sample for sample, score in found.items() if not math.isfinite(score)]
        if broken:
            raise RuntimeError(
                f"reward.models.{name}: {len(broken)} of {len(found)} scores are not finite (sample {min(broken)}: "
                f"{found[min(broken)]}); with reward.models.{name}.dtype = float32 its layers have more range, and if "
                "that changes nothing, its weights are broken"
            )
        return found, costs

    def _normalized(
        self, name: str, model: RewardModelConfig, tickets: Sequence[Ticket], scores: list[float]
    ) -> list[float]:
        values = scores
        if model.normalize == "group":
            values = standardized_in_groups([ticket.group for ticket in tickets], scores)
        elif model.normalize == "batch":
            values = standardized_in_groups([0] * len(scores), scores)
        elif model.normalize == "running":
            self.seen[name] = self.seen[name].with_more(scores)
            values = standardized(scores, self.seen[name])
        return clipped(values, model.clip)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: of each model with a running normalisation, what was seen so far."""
        return {name: asdict(moments) for name, moments in self.seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` said; a model that it doesn't know begins anew."""
        self.seen = {name: Moments(**state[name]) if name in state else moments for name, moments in self.seen.items()}
