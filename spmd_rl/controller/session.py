"""A run as rank 0 controls it: its steps, and all that happens around them whatever the algorithm."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.algorithms.kl_controller import KlController
from spmd_rl.algorithms.schedule import learning_rates
from spmd_rl.algorithms.table import Reduction
from spmd_rl.algorithms.token_statistics import gae_metrics, whitening
from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase
from spmd_rl.controller.batch import Batch
from spmd_rl.controller.checkpoint_manager import CheckpointManager
from spmd_rl.controller.planner import Plan, plan_microbatches
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.reward_models import RewardModels
from spmd_rl.controller.sampling import Rollout
from spmd_rl.data.samples import SAMPLES
from spmd_rl.data.seeds import derived_seed
from spmd_rl.data.sources.order import PromptOrder
from spmd_rl.data.tickets import SampleReward, Ticket
from spmd_rl.evaluation.benchmark import Benchmark, ask_all
from spmd_rl.runlog.checkpoint_store import SavedCheckpoint
from spmd_rl.runlog.console import untrained_line
from spmd_rl.runlog.run_log import RunLog, Timed

NOTHING_EXCHANGED = {"bytes/exchange/network": 0.0, "update/padding_fraction": 0.0, "update/imbalance_fraction": 0.0}
SCORING = {
    "policy": Phase.POLICY_LOGPROBS,
    "reference": Phase.REFERENCE_LOGPROBS,
    "critic": Phase.CRITIC_VALUES,
}
"""Names in the metrics of the time that a model scores."""
UPDATING = {"policy": Phase.UPDATE, "critic": Phase.CRITIC_UPDATE}
"""The same of the time that it learns."""


@dataclass(frozen=True)
class RunContext:
    """Hold what rank 0 needs to know beside the configuration."""

    run_dir: Path
    order: PromptOrder
    benchmarks: Sequence[Benchmark]
    data_parallel: int
    share_prompts: bool
    resumed: SavedCheckpoint | None = None
    """The checkpoint that the run goes on from."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Describes what it learns from, by runtime.sources."""


class Session:
    """Give a training loop its steps.

    A second algorithm is a second loop over the same `steps`; see spmd_rl/grpo.py.
    """

    def __init__(self, config: Config, ranks: Ranks, log: RunLog, context: RunContext):
        self.config, self.ranks, self.log, self.context = config, ranks, log, context
        self.reward_models = RewardModels(config, context.data_parallel, context.share_prompts)
        self.checkpoints = CheckpointManager(config, ranks, log, context.resumed, context.sources)
        restored = self.checkpoints.restored_state()
        self.prompts_taken: int = restored.get("prompts_taken", 0)
        self.kept_prompts: list[int] = list(restored.get("kept_prompts", []))
        """Rows that were left over: the next step begins with them."""
        self.reward_models.load_state_dict(restored.get("reward_models", {}))
        algorithm = config.algorithm
        target = algorithm.kl_target if algorithm.kl_control == "adaptive" else None
        self.kl_control = KlController(algorithm.kl_coefficient, target, algorithm.kl_horizon)
        self.kl_control.load_state_dict(restored.get("kl_control", {}))
        self.rate_factors: dict[str, float] = restored.get("rate_factors", {})
        """By the name of a model that learns, where updates were skipped (train.skipped_rate_factor)."""

    def steps(self) -> Iterator["Step"]:
        """Yield the steps that are left, from where the run goes on; a step ends when the next one is asked for.

        Evaluates, saves, and logs samples, memory and metrics around them. Raises Preempted after a step when a rank
        was asked to end and all is saved.
        """
        evaluation, last = self.config.evaluation, self.config.train.steps
        if self.checkpoints.first_step == 0 and evaluation.before:
            self._evaluate(0)
        for number in range(self.checkpoints.first_step, last):
            with self.log.step(number + 1):
                step = Step(self, number)
                yield step
                step.end()
            done = number + 1
            if evaluation.after if done == last else due(done, evaluation.every_steps):
                self._evaluate(done)
            # Beside the next steps; goes on exactly from here.
            self.checkpoints.maybe_save(done, self._state())
        self.checkpoints.close()
        if self.config.run.export_hf:
            with self.log.timed(Phase.EXPORT):
                self.ranks.export_hf(str(self.context.run_dir / "hf"))

    def take_prompts(self, count: int) -> list[int]:
        """Return the rows of the next prompts to train on."""
        kept, self.kept_prompts[:count] = self.kept_prompts[:count], []
        rows = self.context.order.take(self.prompts_taken, count - len(kept))
        self.prompts_taken += len(rows)
        return kept + rows

    def _state(self) -> dict[str, Any]:
        """Return what a continuation needs of rank 0, as JSON."""
        return {
            "prompts_taken": self.prompts_taken,
            "kept_prompts": list(self.kept_prompts),
            "reward_models": self.reward_models.state_dict(),
            "kl_control": self.kl_control.state_dict(),
            "rate_factors": dict(self.rate_factors),
        }

    def lower_rate(self, model: str) -> float:
        """Lower a model's learning rate for good, as train.skipped_rate_factor says; returns the factor."""
        factor = self.config.train.skipped_rate_factor
        if factor < 1.0:
            self.rate_factors[model] = self.rate_factors.get(model, 1.0) * factor
            found = self.rate_factors[model]
            self.log.note(f"learning rate of the {model}: {found:.4g} of its schedule from now on")
        return factor

    def _evaluate(self, step: int) -> None:
        """Ask all held-out questions and keep the answers; the ranks are back in training mode afterwards."""
        if not self.context.benchmarks:
            return
        with self.log.timed(Phase.EVALUATION), self.ranks.rollout_mode():
            metrics = ask_all(self.ranks, self.context.benchmarks, step, self.config, self.log.questions)
        self.log.evaluation(step, metrics)


class Step:
    """Do what one step is made of, on all ranks; each part is timed under its own name.

    Where nothing is left to train on, it exchanges, scores and learns nothing.
    """

    def __init__(self, session: Session, number: int):
        self.session, self.number = session, number
        """The number counts from 0; the log counts from 1."""
        self.config, self.ranks, self.log = session.config, session.ranks, session.log
        self.timed: Timed = self.log.timed
        self.learning_rates = {
            model: rate * session.rate_factors.get(model, 1.0)
            for model, rate in learning_rates(self.config, number).items()
        }
        """By the name of the model that learns."""
        self.batch = Batch([], {})
        self.plan: Plan | None = None
        self._scored: dict[int, SampleReward] = {}
        self._tokens: dict[str, float] = {}
        """Metrics of what the ranks made of rewards, token by token."""
        policy = self.learning_rates["policy"]
        self._metrics: list[Mapping[str, float]] = [{"actor/lr": policy}]
        self._metrics.append(
            {"critic/lr": self.learning_rates["critic"]} if "critic" in self.learning_rates else {"grpo/lr": policy}
        )

    @contextmanager
    def rollout(self) -> Iterator[Rollout]:
        """Let vLLM hold the device inside, with the policy's weights, which are refreshed and proved on entry."""
        self.session.checkpoints.advance()
        compare = due(self.number, self.config.rollout.canary_steps)
        with self.ranks.rollout_mode(self.timed, compare) as moved, self.timed(Phase.ROLLOUT):
            rollout = Rollout(
                self.config, self.ranks, self.number, self.session.take_prompts, self.session.kept_prompts.extend
            )
            yield rollout
        self._scored = rollout.scored
        self._metrics += [moved, *rollout.metrics]

    def reward(self, tickets: Sequence[Ticket], greedy: Sequence[Ticket] = ()) -> Batch:
        """Return the samples with their rewards: rules have graded as sequences ended, reward models score now.

        `greedy`: responses to compare with, which get their rewards too (Rollout.generate_greedy).
        """
        self.session.checkpoints.advance()
        scored, grading = self.ranks.rewards()
        scored = self._scored | scored
        scored, scoring = self.session.reward_models.score(self.ranks, [*tickets, *greedy], scored, self.timed)
        self._metrics += [grading, scoring]
        self.batch = Batch(tickets, scored, greedy=greedy)
        return self.batch

    def exchange(self, batch: Batch) -> None:
        """Bring each sample to the ranks that train on it, in one all-to-all, never through rank 0."""
        train, context = self.config.train, self.session.context
        tickets = batch.to_train()
        if not tickets:
            self.log.add_all(NOTHING_EXCHANGED)
            self.log.note(untrained_line(self.number + 1))
            return
        with self.timed(Phase.ADVANTAGE):
            # Lengths -> balanced, packed micro-batches of each data-parallel rank.
            self.plan = plan_microbatches(
                tickets,
                context.data_parallel,
                train.minibatches,
                train.microbatch_tokens,
                context.share_prompts,
                train.patches_per_microbatch,
                train.sequences_per_microbatch,
            )
        with self.timed(Phase.EXCHANGE):
            self.log.add_all(self.ranks.exchange(self.plan))

    @property
    def off_policy(self) -> bool:
        """Return whether mini-batches follow the first, and their ratio needs the policy before it."""
        if self.plan is None or self.config.algorithm.old_logprobs == "rollout":
            return False
        return len(self.plan.minibatches) * self.config.train.epochs > 1

    def score(self, model: str, when: bool = True, whole: bool = True) -> None:
        """Have a model give each exchanged sample its log-probabilities, or its values; they stay on the ranks.

        Unless `whole`, the mini-batch that is learned first and once is left out: the model that scores it then is the
        model that learns from it.
        """
        if when and self.plan is not None:
            train = self.config.train
            with self.timed(SCORING.get(model, model)):
                out = 0 if whole or train.epochs > 1 or train.shuffle_mini_batch else 1
                self.log.add_all(self.ranks.score(model, out))

    def rewards_with_kl(self) -> list[float]:
        """Return each sample's reward less what its divergence from the reference costs, where it was exchanged."""
        control, batch = self.session.kl_control, self.batch
        beta = control.beta
        with self.timed(Phase.ADVANTAGE):
            found = self.ranks.sample_kl() if self.plan is not None else {}
        if found:
            tokens = {ticket.id: max(ticket.loss_tokens, 1) for ticket in batch.tickets}
            mean = sum(kl / tokens[sample] for sample, kl in found.items()) / len(found)
            self.log.add_all({"kl/beta": beta, "kl/mean": mean})
            control.update(mean, len(found))
        earned = zip(batch.tickets, batch.rewards, strict=True)
        return [reward - beta * found.get(ticket.id, 0.0) for ticket, reward in earned]

    def put(self, field: str, values: Mapping[int, float]) -> None:
        """Set a field of exchanged samples, by id: one number for each of a sample's loss tokens."""
        if self.plan is not None:
            first = "critic" if self.config.algorithm.uses_critic else "policy"  # in its warm-up it learns alone
            with self.timed(UPDATING[first]):
                ids = [i for minibatch in self.plan.minibatches for i in minibatch.ids]
                self.ranks.put(field, {i: values[i] for i in ids})

    def estimate_gae(self, rewards: Mapping[int, float], kl_control: KlController) -> None:
        """Give each exchanged token its advantage, whitened over the step, and its return, from the critic's values.

        `rewards`: by id. Only counts, means, squares and extremes come to rank 0 (algorithms/gae.py).
        """
        if self.plan is None:
            return
        algorithm = self.config.algorithm
        with self.timed(Phase.ADVANTAGE):
            found, seconds = self.ranks.estimate_gae(rewards, kl_control.beta if algorithm.kl_in_reward else 0.0)
            clipped = self.ranks.whiten("advantages", *whitening(found["advantages"].moments))
        self._tokens = gae_metrics(found, clipped)
        self.log.add_all(seconds)
        if algorithm.kl_in_reward:
            kl = found["kl"].moments
            self._tokens |= {"kl/beta": kl_control.beta, "kl/mean": kl.mean}
            kl_control.update(kl.mean, kl.count)

    def weights(self, reduce: Reduction) -> dict[int, float]:
        """Return the weight of each sample's tokens in the loss of its mini-batch."""
        tokens_of = {ticket.id: ticket.loss_tokens for ticket in self.batch.tickets}
        found: dict[int, float] = {}
        for minibatch in self.plan.minibatches if self.plan is not None else []:
            found |= zip(minibatch.ids, reduce([tokens_of[i] for i in minibatch.ids]), strict=True)
        return found

    def minibatches(self, model: str = "policy", when: bool = True) -> Iterator[int]:
        """Yield the number of each mini-batch of each epoch, for one optimizer step of a model each."""
        self.session.checkpoints.advance()
        if not when:
            return
        train, seed = self.config.train, self.config.run.seed
        epochs = self.config.critic_epochs if model == "critic" else train.epochs
        with self.timed(UPDATING.get(model, Phase.UPDATE)):
            count = len(self.plan.minibatches) if self.plan is not None else 0
            for epoch in range(epochs):
                order = list(range(count))
                if train.shuffle_mini_batch:
                    random.Random(derived_seed(f"mini-batches of {model}", seed, self.number, epoch)).shuffle(order)
                yield from order

    def learn(self, model: str, minibatch: int) -> None:
        """Make one optimizer step of a model on a mini-batch."""
        metrics, skipped = self.ranks.learn(model, minibatch, self.learning_rates[model])
        if skipped:
            self.learning_rates[model] *= self.session.lower_rate(model)
        if skipped and self.ranks.suspects:
            kept = self.ranks.conversations(self.ranks.suspects, self.number + 1)
            self.log.skipped_samples(self.number + 1, minibatch, kept, model)
        if model == "policy":
            metrics["actor/grad_norm"] = metrics["grad_norm"]
        else:
            metrics[f"{model}/grad_norm"] = metrics.pop("grad_norm")
            metrics[f"{UPDATING.get(model, model)}/skipped"] = metrics.pop("update/skipped")
        self.log.learning(metrics, skipped, model)

    def end(self) -> None:
        """Log what the step came to, and have the ranks drop its samples."""
        for metrics in self._metrics:
            self.log.add_all(metrics)
        of = "critic" if self.config.algorithm.uses_critic else "grpo"
        self.log.add_all(self.batch.metrics(self.config.reward, of) | self._tokens)
        log_samples(self.ranks, self.log, self.batch.tickets, self.number + 1, self.config.run.samples_logged)
        costs, holds = self.ranks.costs()
        self.log.add_all(costs)
        self.log.ranks(self.number + 1, holds)
        self.ranks.forget()


def log_samples(ranks: Ranks, log: RunLog, tickets: Sequence[Ticket], step: int, count: int) -> None:
    """Write `count` of a step's graded samples, spread over its prompts, to samples/; -1: every rank writes its own.

    A few come to rank 0, which writes one file; all of them would be heavy.
    """
    if count == -1:
        ranks.write_conversations(str(log.run_dir / SAMPLES), step)
    elif count:
        stride = max(1, len(tickets) // count)
        log.samples(step, ranks.conversations([ticket.id for ticket in tickets[::stride][:count]], step))


def due(step: int, every: int) -> bool:
    """Return whether something that happens every so many steps happens at this one."""
    return every > 0 and step % every == 0
