"""GRPO's loop on rank 0, driven with ranks that only write down what they are told."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from spmd_rl.config.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from spmd_rl.config.critic_config import CriticConfig
from spmd_rl.controller.session import RunContext, Session
from spmd_rl.data.sources.order import PromptOrder
from spmd_rl.data.tickets import SampleReward, Ticket
from spmd_rl.evaluation.benchmark import Benchmark
from spmd_rl.grpo import run_grpo
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.run_log import RunLog

PROMPTS, SAMPLES = 4, 2
Rewards = Callable[[int, int], float]
"""(step from 0, sample) -> reward."""


def teaching(step: int, sample: int) -> float:
    return float(sample % SAMPLES)


def uniform(step: int, sample: int) -> float:
    return 0.0


@dataclass
class RecordingRanks:
    """Stand for the ranks: write each verb down, and answer as simply as possible."""

    reward: Rewards
    told: list[str] = field(default_factory=list)
    learned: list[dict] = field(default_factory=list)
    generated: list[tuple] = field(default_factory=list)
    consistency: list[bool] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    fields: dict[str, dict[int, float]] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)
    """Of each time that a model scored: mini-batches at the beginning."""

    @contextmanager
    def rollout_mode(self, timed=None, canary: bool = False) -> Iterator[dict[str, float]]:
        self.told.append("to_rollout")
        self.consistency.append(canary)
        moved = {"bytes/reshard_to_infer/network": 0.0}
        yield moved
        self.told.append("to_training")

    def generate(
        self, split, rows, step, samples_per_prompt, sampling, first_id=0
    ) -> tuple[list[Ticket], dict[str, float]]:
        self.told.append(f"generate {split}")
        self.generated.append((split, tuple(rows), step, samples_per_prompt))
        self.temperatures.append(sampling.temperature)
        self.step = step
        first_group = first_id // samples_per_prompt
        tickets = [
            Ticket(group * samples_per_prompt + sample, group, 5, 3, 3, "stop", step)
            for group in range(first_group, first_group + len(rows))
            for sample in range(samples_per_prompt)
        ]
        self.tickets = [*self.tickets, *tickets] if first_id else tickets
        return tickets, {"rollout/truncated_fraction": 0.0}

    def rewards(self) -> tuple[dict[int, SampleReward], dict[str, float]]:
        self.told.append("rewards")
        scored = {}
        for ticket in self.tickets:
            reward = self.reward(self.step, ticket.id)
            cause = "correct" if reward else "wrong"
            scored[ticket.id] = SampleReward(ticket.id, reward, cause, {"math_answer": reward})
        return scored, {"timing/non_overlap_rule_reward": 0.0}

    def exchange(self, plan) -> dict[str, float]:
        self.told.append("exchange")
        self.plan = plan
        return {"bytes/exchange/network": 1.0, "update/padding_fraction": 0.0, "update/imbalance_fraction": 0.25}

    def score(self, model: str, left_out: int = 0) -> dict[str, float]:
        self.told.append(f"score {model}")
        self.left_out.append(left_out)
        return {}

    def sample_kl(self) -> dict[int, float]:
        self.told.append("sample_kl")
        return {i: float(i) for minibatch in self.plan.minibatches for i in minibatch.ids}

    def put(self, field: str, values: Mapping[int, float]) -> None:
        self.told.append(f"put {field}")
        self.fields[field] = dict(values)

    def learn(self, model, minibatch, learning_rate) -> tuple[dict[str, float], str]:
        self.told.append("learn")
        ids = self.plan.minibatches[minibatch].ids
        self.learned.append(
            {
                "model": model,
                "minibatch": minibatch,
                "ids": list(ids),
                "advantages": [self.fields["advantages"][i] for i in ids],
                "weights": [self.fields["weights"][i] for i in ids],
                "learning_rate": learning_rate,
            }
        )
        return {"grad_norm": 1.0, "update/skipped": 0.0}, ""

    def conversations(self, ids: Sequence[int], step: int) -> list[dict]:
        self.told.append("conversations")
        return [{"id": sample, "index": sample, "cause": "wrong", "extracted": "0"} | _TEXT for sample in ids]

    def compare_answers(self, split: str, pairs: Sequence) -> list[bool]:
        self.told.append("compare_answers")
        return [False for _ in pairs]

    def costs(self) -> tuple[dict[str, float], list[dict[str, int]]]:
        self.told.append("costs")
        return {"memory/peak_bytes": 1.0}, [{}]

    def forget(self) -> None:
        self.told.append("forget")

    def export_hf(self, directory: str) -> None:
        self.told.append("export_hf")

    def checkpoint_bytes(self) -> int:
        self.told.append("checkpoint_bytes")
        return 0

    def begin_checkpoint(self, directory: str) -> None:
        self.told.append("begin_checkpoint")

    def checkpoint_progress(self, wait: bool) -> tuple[bool, str | None, bool]:
        self.told.append("checkpoint_progress")
        return True, None, False

    def checkpoint_digests(self, directory: str, names: Sequence[str], wait: bool) -> Mapping[str, str]:
        self.told.append("checkpoint_digests")
        return {name: "0" for name in names}


_TEXT = {"prompt": "2 + 2?", "response": "0", "response_tokens": 3, "finish_reason": "stop", "answer": "4"}


@dataclass
class Driven:
    """Hold what became of a run."""

    ranks: RecordingRanks
    rows: list[dict]
    console: str

    def told(self, leave_out: Sequence[str] = ("checkpoint_progress",)) -> list[str]:
        return [verb for verb in self.ranks.told if verb not in leave_out]


@pytest.fixture
def drive(tmp_path, capsys):
    """Return what drives a run to its end, on from the newest checkpoint of its directory."""

    def run(
        reward: Rewards = teaching,
        steps: int = 1,
        directory: str = "run",
        loop=run_grpo,
        make_ranks=RecordingRanks,
        **settings,
    ) -> Driven:
        config = configured(steps, **settings)
        ranks = make_ranks(reward)
        checkpoints = CheckpointStore(tmp_path / directory / "checkpoints", config.checkpoint).found()
        resumed = checkpoints[-1] if checkpoints else None
        with RunLog(config, tmp_path / directory, 2, resumed.step if resumed else None) as log:
            context = RunContext(
                run_dir=log.run_dir,
                order=PromptOrder((10,), config.run.seed, False),
                benchmarks=[Benchmark("held", "eval", 3)] if settings.get("evaluation") else [],
                data_parallel=2,
                share_prompts=True,
                resumed=resumed,
            )
            loop(config, Session(config, ranks, log, context))
        lines = (tmp_path / directory / "metrics.jsonl").read_text().splitlines()
        return Driven(ranks, [json.loads(line) for line in lines], capsys.readouterr().out)

    return run


def configured(
    steps: int, algorithm=None, train=None, checkpoint=None, evaluation=None, run=None, critic=None
) -> Config:
    few = {"steps": steps, "prompts_per_step": PROMPTS, "tokens_per_microbatch": 100, "learning_rate": 1e-3}
    quiet = {"wandb": "off", "tensorboard": False, "samples_logged": 0, "export_hf": False}
    return Config(
        ModelConfig("m"),
        run=RunConfig(**quiet | (run or {})),
        train=TrainConfig(**few | (train or {})),
        algorithm=AlgorithmConfig(**{"samples_per_prompt": SAMPLES} | (algorithm or {})),
        checkpoint=CheckpointConfig(**checkpoint or {}),
        evaluation=EvaluationConfig(**evaluation or {}),
        critic=CriticConfig(**critic or {}),
    )


ROLLOUT = ["to_rollout", "generate train", "to_training", "rewards"]
PUT = ["put advantages", "put weights"]
END = ["costs", "forget"]


def test_a_step_is_rollout_reward_exchange_update(drive):
    assert drive().told() == [*ROLLOUT, "exchange", *PUT, "learn", *END]


def test_a_divergence_needs_the_reference(drive):
    told = drive(algorithm={"kl_coefficient": 0.1}).told()
    assert told == [*ROLLOUT, "exchange", "score reference", *PUT, "learn", *END]


def test_a_divergence_in_the_reward_is_paid_by_each_sample_before_it_is_compared(drive):
    algorithm = {"kl_coefficient": 0.5, "kl_in_reward": True, "kl_estimator": "k1", "normalize_std": False}
    driven = drive(algorithm=algorithm)
    scores = ["score policy", "score reference", "sample_kl"]
    assert driven.told() == [*ROLLOUT, "exchange", *scores, *PUT, "learn", *END]
    # Rewards 0 and 1, of which samples 0, 1, 2, ... pay half of 0, 1, 2, ...
    assert driven.ranks.learned[0]["advantages"] == [-0.25, 0.25] * 4
    assert driven.rows[0]["kl/mean"] == pytest.approx(3.5 / 3) and driven.rows[0]["kl/beta"] == 0.5
    assert driven.rows[0]["grpo/rewards/mean"] == 0.5, "what is logged is what was earned"


def test_further_prompts_are_sampled_until_enough_groups_teach_and_a_continuation_goes_on_from_the_last(drive):
    # Only groups 1 and 3 of the first four teach, then the second of two, then the one that is asked for.
    teach = {3, 7, 11, 13}
    reward = lambda step, sample: float(sample in teach)  # noqa: E731
    settings = {"algorithm": {"curation": "teaching", "refill_attempts": 3}, "checkpoint": {"every_steps": 1}}
    whole = drive(reward, 2, directory="whole", **settings)
    asked = [rows for _, rows, _, _ in whole.ranks.generated]
    assert asked[:3] == [(0, 1, 2, 3), (4, 5), (6,)] and asked[3:] == [(7, 8, 9, 10), (11, 12), (13,)]
    assert [learned["ids"] for learned in whole.ranks.learned] == [[2, 3, 6, 7, 10, 11, 12, 13]] * 2
    row = whole.rows[0]
    assert row["rollout/refills"] == 2 and row["rollout/samples"] == 14
    assert row["groups/kept_fraction"] == pytest.approx(4 / 7)
    first, rest = (drive(reward, steps, **settings) for steps in (1, 2))
    assert first.ranks.generated + rest.ranks.generated == whole.ranks.generated


@pytest.mark.parametrize(("leftover", "second"), [("drop", (8, 9, 10, 11)), ("keep", (6, 8, 9, 10))])
def test_groups_that_are_left_over_are_dropped_or_their_prompts_begin_the_next_step(drive, leftover, second):
    # Of the first four prompts two teach, then three of four: the last of them is one too many.
    teach = {3, 7, 9, 11, 13}
    reward = lambda step, sample: float(sample in teach)  # noqa: E731
    refill = {"refill_attempts": 3, "refill_oversample": 1.6, "refill_leftover": leftover}
    settings = {"algorithm": {"curation": "teaching", **refill}, "checkpoint": {"every_steps": 1}}
    whole = drive(reward, 2, directory="whole", **settings)
    asked = [rows for _, rows, _, _ in whole.ranks.generated]
    assert asked[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)] and asked[2] == second
    assert [learned["ids"] for learned in whole.ranks.learned] == [[2, 3, 6, 7, 8, 9, 10, 11]] * 2
    row = whole.rows[0]
    assert row["rollout/samples"] == 16 and row["groups/kept_fraction"] == pytest.approx(4 / 7)
    first, rest = (drive(reward, steps, **settings) for steps in (1, 2))
    assert first.ranks.generated + rest.ranks.generated == whole.ranks.generated


def test_refilling_ends_after_so_many_times_and_where_nothing_teaches_the_run_does(drive):
    settings = {"algorithm": {"curation": "teaching", "refill_attempts": 1}}
    driven = drive(lambda step, sample: float(sample == 3), **settings)
    assert [rows for _, rows, _, _ in driven.ranks.generated] == [(0, 1, 2, 3), (4, 5, 6)]
    assert [learned["ids"] for learned in driven.ranks.learned] == [[2, 3]]
    with pytest.raises(RuntimeError, match="none of the 8 prompts that step 1 sampled teaches: 0 are .* right by all"):
        drive(uniform, directory="nothing", **settings)


class Skipping(RecordingRanks):
    """Make no update."""

    suspects = [3, 1]

    def learn(self, *arguments):
        metrics, _ = super().learn(*arguments)
        return metrics, "beyond a bound"


def test_the_samples_of_a_skipped_update_are_kept(drive, tmp_path):
    driven = drive(steps=2, make_ranks=Skipping)
    assert driven.told() == [*ROLLOUT, "exchange", *PUT, "learn", "conversations", *END] * 2
    kept = sorted((tmp_path / "run" / "skipped").iterdir())
    assert [path.name for path in kept] == [f"step_00000{step}_minibatch_0.jsonl" for step in (1, 2)]
    assert [json.loads(line)["id"] for line in kept[0].read_text().splitlines()] == [3, 1]
    assert "step 1: the update was skipped: beyond a bound" in driven.console


class SkippingFirst(RecordingRanks):
    """Skip the first update after a start."""

    suspects = [3]

    def learn(self, *arguments):
        metrics, _ = super().learn(*arguments)
        return metrics, "beyond a bound" if len(self.learned) == 1 else ""


def test_a_skipped_update_lowers_the_rate_for_good_and_a_checkpoint_knows(drive):
    train = {"skipped_rate_factor": 0.5, "minibatches": 2}
    settings = {"make_ranks": SkippingFirst, "train": train, "checkpoint": {"every_steps": 1}}
    driven = drive(steps=2, directory="parts", **settings)
    assert [learned["learning_rate"] for learned in driven.ranks.learned] == [1e-3, 5e-4, 5e-4, 5e-4]
    assert [row["grpo/lr"] for row in driven.rows] == [1e-3, 5e-4]
    assert "learning rate of the policy: 0.5 of its schedule from now on" in driven.console
    rest = drive(steps=3, directory="parts", **settings)
    assert [learned["learning_rate"] for learned in rest.ranks.learned] == [5e-4, 2.5e-4]
    stays = drive(steps=2, directory="stays", **settings | {"train": {"minibatches": 2}})
    assert {learned["learning_rate"] for learned in stays.ranks.learned} == {1e-3}


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_several_minibatches_need_the_policy_before_the_first(drive, kl):
    driven = drive(train={"minibatches": 2}, algorithm={"kl_coefficient": kl})
    scores = ["score policy", *(["score reference"] if kl else [])]
    assert driven.told() == [*ROLLOUT, "exchange", *scores, *PUT, "learn", "learn", *END]
    assert [learned["minibatch"] for learned in driven.ranks.learned] == [0, 1]
    assert [learned["ids"] for learned in driven.ranks.learned] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_sample_learns_from_is_its_own(drive):
    driven = drive(algorithm={"normalize_std": False}, train={"minibatches": 2})
    for learned in driven.ranks.learned:
        assert learned["advantages"] == [-0.5, 0.5] * 2
        assert learned["weights"] == [1 / 12] * 4, "1 / tokens of the mini-batch"
        assert learned["learning_rate"] == driven.rows[0]["grpo/lr"] == 1e-3


def test_groups_that_teach_nothing_are_left_out(drive):
    driven = drive(lambda step, sample: float(sample == 3), algorithm={"drop_uniform_groups": True})
    assert [learned["ids"] for learned in driven.ranks.learned] == [[2, 3]]
    assert driven.rows[0]["groups/kept_fraction"] == 0.25


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_in_which_no_group_teaches_trains_nothing_and_the_run_goes_on(drive, kl, minibatches):
    settings = {
        "algorithm": {"drop_uniform_groups": True, "kl_coefficient": kl},
        "train": {"minibatches": minibatches},
    }
    driven = drive(lambda step, sample: uniform(step, sample) if step == 0 else teaching(step, sample), 2, **settings)
    told = driven.told()
    assert told[: len(ROLLOUT + END)] == ROLLOUT + END
    assert told[len(ROLLOUT + END) :] == drive(directory="teaches", **settings).told()
    empty, after = driven.rows
    assert empty["groups/kept_fraction"] == 0.0 and empty["update/imbalance_fraction"] == 0.0
    assert empty["grpo/lr"] == after["grpo/lr"] == 1e-3
    assert "grad_norm" not in empty and after["grad_norm"] == 1.0
    (said,) = [line for line in driven.console.splitlines() if line.startswith("step 1: ")]
    assert "no group of it teaches" in said and "algorithm.drop_uniform_groups" in said


def test_without_dropping_a_step_in_which_no_group_teaches_is_one_like_any_other(drive):
    assert drive(uniform, algorithm={"kl_coefficient": 0.1}).told() == [
        *ROLLOUT,
        "exchange",
        "score reference",
        *PUT,
        "learn",
        *END,
    ]


def test_questions_are_asked_before_training_every_few_steps_and_at_the_end(drive):
    asked = ["to_rollout", "generate eval", "rewards", "conversations", "forget", "to_training"]
    one = [*ROLLOUT, "exchange", *PUT, "learn", *END]
    driven = drive(steps=3, evaluation={"every_steps": 2})
    told = driven.told(leave_out=("checkpoint_progress", "compare_answers"))
    assert told == [*asked, *one, *one, *asked, *one, *asked]
    assert [row["step"] for row in driven.rows if "eval/held/accuracy" in row] == [0, 2, 3]
    steps = [step for split, _, step, _ in driven.ranks.generated if split == "eval"]
    assert steps == [0, 2, 3]


def test_a_checkpoint_begins_after_the_step_and_what_follows_it(drive):
    save = ["checkpoint_bytes", "begin_checkpoint"]
    one = [*ROLLOUT, "exchange", *PUT, "learn", *END]
    driven = drive(steps=3, checkpoint={"every_steps": 2}, run={"export_hf": True})
    told = driven.told(leave_out=("checkpoint_progress", "checkpoint_digests"))
    assert told == [*one, *one, *save, *one, *save, "export_hf"]


def test_a_continuation_takes_the_prompts_that_would_have_come(drive):
    settings = {
        "algorithm": {"drop_uniform_groups": True, "kl_coefficient": 0.1},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
    }
    # No group of the second step teaches: it counts like any other.
    reward = lambda step, sample: uniform(step, sample) if step == 1 else teaching(step, sample)  # noqa: E731
    whole = drive(reward, 4, directory="whole", **settings)
    first = drive(reward, 2, **settings)
    rest = drive(reward, 4, **settings)
    assert first.ranks.generated + rest.ranks.generated == whole.ranks.generated
    assert [rows for _, rows, _, _ in whole.ranks.generated] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert first.ranks.learned + rest.ranks.learned == whole.ranks.learned
    same = ("step", "groups/kept_fraction", "grpo/rewards/mean", "grpo/lr", "update/imbalance_fraction")
    assert [[row[name] for name in same] for row in rest.rows] == [[row[name] for name in same] for row in whole.rows]


def test_a_sample_is_compared_with_both_engines_every_few_steps(drive):
    config = configured(4)
    assert config.rollout.canary_steps == 10
    assert drive(steps=12).ranks.consistency == [step % 10 == 0 for step in range(12)]


def test_a_few_samples_are_written_down_after_the_update(drive):
    assert drive(run={"samples_logged": 2}).told() == [*ROLLOUT, "exchange", *PUT, "learn", "conversations", *END]


def test_remax_compares_each_sample_with_the_greedy_response_to_its_prompt(drive):
    # Samples 0 to 7 are of four prompts; 8 to 11 are the greedy responses to them.
    rewards = {1: 1.0, 2: 1.0, 8: 0.5, 11: 2.0}
    driven = drive(lambda step, sample: rewards.get(sample, 0.0), algorithm={"advantage": "remax"})
    greedy = ["to_rollout", "generate train", "generate train", "to_training", "rewards"]
    assert driven.told() == [*greedy, "exchange", *PUT, "learn", *END]
    assert [(rows, samples) for _, rows, _, samples in driven.ranks.generated] == [((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1)]
    assert driven.ranks.temperatures == [1.0, 0.0]
    (learned,) = driven.ranks.learned
    assert learned["ids"] == list(range(8))
    assert learned["advantages"] == [-0.5, 0.5, 1.0, 0.0, 0.0, 0.0, -2.0, -2.0]
    assert driven.rows[0]["grpo/baseline/max"] == 2.0 and driven.rows[0]["grpo/rewards/max"] == 1.0


def test_one_sample_a_prompt_is_enough_where_nothing_is_compared_within_a_group(drive):
    algorithm = {"advantage": "reinforce_plus_plus", "samples_per_prompt": 1, "std_epsilon": 0.0}
    driven = drive(lambda step, sample: float(sample % 2), algorithm=algorithm)
    (learned,) = driven.ranks.learned
    spread = (11 / 12) ** 0.5  # of twelve tokens, half with 0 and half with 1
    assert learned["advantages"] == pytest.approx([-spread, spread] * 2)


def run_reinforce(config, session):
    """A second algorithm: the mean of the step is the baseline, nothing is scored."""
    for step in session.steps():
        with step.rollout() as rollout:
            samples = rollout.generate()
        batch = step.reward(samples)
        mean = sum(batch.rewards) / len(batch.rewards)
        step.exchange(batch)
        step.put("advantages", batch.by_id([reward - mean for reward in batch.rewards]))
        step.put("weights", step.weights(lambda tokens: [1 / sum(tokens)] * len(tokens)))
        for minibatch in step.minibatches():
            step.learn("policy", minibatch)


def test_a_second_algorithm_is_a_second_loop_that_shares_all_around_the_steps(drive):
    settings = {"evaluation": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "run": {"export_hf": True}}
    two, one = (
        drive(steps=3, loop=loop, directory=loop.__name__, **settings).ranks for loop in (run_reinforce, run_grpo)
    )
    assert two.told == one.told
    assert two.learned[0]["advantages"] == [-0.5, 0.5] * 4


def run_with_refill(config, session):
    """Sample until enough groups were made: two at a time."""
    for step in session.steps():
        samples = []
        with step.rollout() as rollout:
            while len(samples) < PROMPTS * SAMPLES:
                samples += rollout.generate(2)
        assert len(step.reward(samples).rewards) == PROMPTS * SAMPLES


def test_a_step_may_sample_several_times_and_no_two_samples_have_one_id(drive):
    driven = drive(steps=2, loop=run_with_refill)
    assert driven.told() == ["to_rollout", *["generate train"] * 2, "to_training", "rewards", *END] * 2
    assert [ticket.id for ticket in driven.ranks.tickets] == list(range(PROMPTS * SAMPLES))
    assert [ticket.group for ticket in driven.ranks.tickets] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rows for _, rows, _, _ in driven.ranks.generated] == [(0, 1), (2, 3), (4, 5), (6, 7)]
