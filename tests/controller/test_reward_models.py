"""Test what becomes of reward models' scores on rank 0."""

import dataclasses
import math
from contextlib import nullcontext

import pytest

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.reward_config import RewardConfig, RewardModelConfig
from spmd_rl.controller.batch import Batch, sample_metrics
from spmd_rl.controller.reward_models import RewardModels
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket

TICKETS = [Ticket(i, i // 2, 10 + i // 2, 5 + i, 5 + i, "stop") for i in range(4)]


class Ranks:
    """Ranks whose models give each sample a known score."""

    def __init__(self, scores: dict[str, list[float]]):
        self.scores, self.plans = scores, []

    def read(self, model):
        return {ticket.id: (ticket.prompt_tokens - 1, ticket.response_tokens + 3) for ticket in TICKETS}

    def keep_rewards(self, scored):
        self.kept = scored

    def judge(self, model, plan):
        self.plans.append(plan)
        return dict(enumerate(self.scores[model])), {"timing/reward_model_onload": 0.5}


def config(rules=None, **models) -> Config:
    base = Config(ModelConfig("m"), reward=RewardConfig(rules=rules or {}, models=models))
    return dataclasses.replace(base, train=dataclasses.replace(base.train, tokens_per_microbatch=100))


def timed(phase):
    assert phase == "reward_model"
    return nullcontext()


def asked(settings: Config, scores: dict[str, list[float]], scored=None):
    models = RewardModels(settings, 2, True)
    return models.score(Ranks(scores), TICKETS, scored or {}, timed)


def test_without_models_nothing_is_touched():
    scored = {0: SampleReward(0, 1.0, "correct", {})}
    found, metrics = RewardModels(config({"exact": 1.0}), 2, True).score(None, TICKETS, scored, timed)
    assert found is scored and metrics == {}


def test_weighted_scores_are_added_to_the_rules_and_kept_as_they_came():
    settings = config({"exact": 2.0}, a=RewardModelConfig("p", weight=0.5), b=RewardModelConfig("q", weight=0.0))
    rules = {t.id: SampleReward(t.id, 2.0, "correct", {"exact": 1.0}) for t in TICKETS}
    found, metrics = asked(settings, {"a": [1.0, 2.0, 3.0, 4.0], "b": [7.0] * 4}, rules)
    assert [found[i].reward for i in range(4)] == [2.5, 3.0, 3.5, 4.0]
    assert found[3].scores == {"exact": 1.0, "a": 4.0, "b": 7.0} and found[3].cause == "correct"
    assert metrics == {"timing/reward_model_onload": 1.0}
    measured = sample_metrics(TICKETS, found, settings.reward)
    assert measured["grpo/a_rewards/mean"] == 2.5 and measured["grpo/b_rewards/mean"] == 7.0
    assert measured["grpo/score/mean"] == measured["grpo/rewards/mean"] == 3.25


@pytest.mark.parametrize(
    "normalize, clip, expected",
    [
        ("none", (), [1.0, 3.0, 10.0, 30.0]),
        ("none", (2.0, 20.0), [2.0, 3.0, 10.0, 20.0]),
        ("group", (), [-math.sqrt(0.5), math.sqrt(0.5)] * 2),
        ("group", (-1.0, 0.5), [-math.sqrt(0.5), 0.5] * 2),
        ("batch", (), [(x - 11) / math.sqrt(526 / 3) for x in (1, 3, 10, 30)]),
        ("running", (), [(x - 11) / math.sqrt(526 / 3) for x in (1, 3, 10, 30)]),
    ],
)
def test_a_normalised_and_clipped_score_is_what_is_rewarded(normalize, clip, expected):
    settings = config(a=RewardModelConfig("p", normalize=normalize, clip=clip))
    found, _ = asked(settings, {"a": [1.0, 3.0, 10.0, 30.0]})
    assert [found[i].reward for i in range(4)] == pytest.approx(expected, abs=1e-5)
    assert [found[i].scores["a"] for i in range(4)] == [1.0, 3.0, 10.0, 30.0]
    assert sample_metrics(TICKETS, found, settings.reward)["grpo/score/mean"] == 11.0


def test_a_running_normalisation_goes_on_from_its_saved_state():
    settings = config(a=RewardModelConfig("p", normalize="running"), b=RewardModelConfig("q"))
    first, second = {"a": [1.0, 2.0, 3.0, 4.0], "b": [0.0] * 4}, {"a": [9.0, 9.0, 0.0, 1.0], "b": [0.0] * 4}
    whole = RewardModels(settings, 1, True)
    whole.score(Ranks(first), TICKETS, {}, timed)
    state = whole.state_dict()
    assert state == {"a": {"count": 4, "mean": 2.5, "squares": 5.0}}
    resumed = RewardModels(settings, 1, True)
    resumed.load_state_dict(state)
    assert resumed.score(Ranks(second), TICKETS, {}, timed) == whole.score(Ranks(second), TICKETS, {}, timed)
    assert resumed.state_dict() == whole.state_dict() != state


def test_samples_that_no_rule_judged_have_no_cause_and_no_accuracy():
    settings = config(a=RewardModelConfig("p"))
    found, _ = asked(settings, {"a": [1.0, 2.0, 3.0, 4.0]})
    assert {one.cause for one in found.values()} == {UNJUDGED}
    assert Batch(TICKETS, found).correct == []
    assert not [name for name in sample_metrics(TICKETS, found, settings.reward) if name.startswith("reward/cause")]


def test_the_plan_is_made_of_the_lengths_that_the_model_reads():
    ranks = Ranks({"a": [0.0] * 4})
    RewardModels(config(a=RewardModelConfig("p", tokens_per_microbatch=30)), 1, True).score(ranks, TICKETS, {}, timed)
    # Prompts of 9 and 10 shared tokens, and 8 to 11 of each sample's own: 9 + 8 + 9 and 10 + 10 + 11 tokens.
    assert sorted(ranks.plans[0].minibatches[0].microbatches[0]) == [[[0, 1]], [[2]], [[3]]]


def test_a_score_that_is_not_finite_stops_the_run_and_names_the_model_and_the_sample():
    with pytest.raises(RuntimeError, match=r"reward.models.a: 2 of 4 scores .* \(sample 1: nan\)"):
        asked(config(a=RewardModelConfig("p")), {"a": [0.0, math.nan, math.inf, 1.0]})


def test_samples_that_no_rule_judges_beside_others_and_tokens_of_images_are_counted():
    tickets = [dataclasses.replace(ticket, image_tokens=8 * ticket.id) for ticket in TICKETS]
    causes = ["correct", UNJUDGED, "wrong", "correct"]
    scored = {i: SampleReward(i, 0.0, cause, {"acc": 0.0}) for i, cause in enumerate(causes)}
    measured = sample_metrics(tickets, scored, RewardConfig(rules={"acc": 1.0}))
    assert {cause: measured[f"reward/cause/{cause}"] for cause in causes} == {
        "correct": 0.5,
        UNJUDGED: 0.25,
        "wrong": 0.25,
    }
    assert measured["prompt_length/image_mean"] == 12
    assert not [name for name in sample_metrics(TICKETS, scored, RewardConfig(rules={"acc": 1.0})) if "image" in name]
