"""The samples of a step with their rewards: what is computed from them before anything is trained."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from spmd_rl.algorithms.curation import group_fractions
from spmd_rl.config.functions import labels
from spmd_rl.config.reward_config import RewardConfig
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket

CAUSES = ("correct", "wrong", "unparsed", "truncated", "timeout", "crash")


@dataclass
class Batch:
    """Hold all samples of a step; lists of numbers are in the order of `tickets`."""

    tickets: Sequence[Ticket]
    scored: dict[int, SampleReward]
    """By id."""
    kept: list[bool] = field(default_factory=list)
    """Which to train on: all, until `keep` says otherwise."""
    greedy: Sequence[Ticket] = ()
    """A greedy response to each prompt, to compare with; nothing is trained on it."""

    def __post_init__(self) -> None:
        self.kept = self.kept or [True] * len(self.tickets)

    @property
    def groups(self) -> list[int]:
        """Return the group of each sample."""
        return [ticket.group for ticket in self.tickets]

    @property
    def rewards(self) -> list[float]:
        """Return the reward of each sample."""
        return [self.scored[ticket.id].reward for ticket in self.tickets]

    @property
    def loss_tokens(self) -> list[int]:
        """Return the number of tokens of each sample that can be trained on."""
        return [ticket.loss_tokens for ticket in self.tickets]

    @property
    def baselines(self) -> list[float]:
        """Return of each sample the reward of the greedy response to its prompt; nothing where there are none."""
        found = {ticket.group: self.scored[ticket.id].reward for ticket in self.greedy}
        return [found[ticket.group] for ticket in self.tickets] if found else []

    @property
    def correct(self) -> list[bool]:
        """Return for each sample whether it is correct; empty when no rule has judged any."""
        causes = [self.scored[ticket.id].cause for ticket in self.tickets]
        return [] if set(causes) <= {UNJUDGED} else [cause == "correct" for cause in causes]

    def keep(self, kept: Sequence[bool]) -> None:
        """Train on these samples alone."""
        self.kept = list(kept)

    def to_train(self) -> list[Ticket]:
        """Return the samples to train on."""
        return list(compress(self.tickets, self.kept))

    def by_id(self, values: Sequence[float]) -> dict[int, float]:
        """Return one number for each sample to train on, by id; `values`: of all samples."""
        found = {ticket.id: value for ticket, value in zip(self.tickets, values, strict=True)}
        return {ticket.id: found[ticket.id] for ticket in self.to_train()}

    def metrics(self, reward: RewardConfig, of: str = "grpo") -> dict[str, float]:
        """Return rewards, scores, causes and lengths of the samples, and fractions of their groups.

        `of`: what the names of rewards and scores begin with, grpo or critic.
        """
        metrics = sample_metrics(self.tickets, self.scored, reward, of)
        metrics |= _spread("grpo/baseline", self.baselines)
        return metrics | group_fractions(self.groups, self.kept, self.correct)


def sample_metrics(
    tickets: Sequence[Ticket], scored: dict[int, SampleReward], reward: RewardConfig, of: str = "grpo"
) -> dict[str, float]:
    """Return the metrics of a step's samples by themselves."""
    scores = [scored[ticket.id] for ticket in tickets]
    rewards = [score.reward for score in scores]
    metrics = _spread(f"{of}/rewards", rewards)
    # The raw score is the weighted sum too; only the scores of reward models may be normalised before they enter it.
    metrics |= _spread(f"{of}/score", [_raw(score, reward) for score in scores] if reward.models else rewards)
    for name, label in (labels(reward.rules) | {name: name for name in reward.models}).items():
        mean = _mean([score.scores[name] for score in scores if name in score.scores])
        metrics |= {f"{before}{label}_rewards/mean": mean for before in ("", *["grpo/"] * (of == "grpo"))}
    if reward.rules:
        causes = Counter(score.cause for score in scores)
        metrics |= {f"reward/cause/{cause}": causes[cause] / max(len(scores), 1) for cause in CAUSES}
        if causes[UNJUDGED]:  # every rule returned None
            metrics[f"reward/cause/{UNJUDGED}"] = causes[UNJUDGED] / len(scores)
    if images := [ticket.image_tokens for ticket in tickets if ticket.image_tokens]:
        metrics["prompt_length/image_mean"] = sum(images) / len(tickets)
    metrics |= _spread("response_length", [ticket.loss_tokens for ticket in tickets])
    return metrics | _spread("prompt_length", [ticket.prompt_tokens for ticket in tickets])


def _raw(score: SampleReward, reward: RewardConfig) -> float:
    weights = reward.rules | {name: model.weight for name, model in reward.models.items()}
    return sum(weights[name] * value for name, value in score.scores.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
