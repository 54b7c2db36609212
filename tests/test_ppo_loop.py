"""PPO's loop on rank 0, driven with ranks that only write down what they are told."""

import math
from dataclasses import dataclass, field

import pytest
import test_grpo_loop as grpo
from test_grpo_loop import END, ROLLOUT, drive  # noqa: F401 (a fixture)

from spmd_rl.algorithms.score_normalization import Moments
from spmd_rl.algorithms.token_statistics import Spread
from spmd_rl.ppo import run_ppo

ALGORITHM = {"advantage": "gae", "samples_per_prompt": 2}
ESTIMATED = ["score critic", "estimate_gae", "whiten advantages", "put weights"]
KL = 0.5
"""Of each sample, a token."""


def spread(*values: float) -> Spread:
    return Spread(Moments().with_more(values), min(values), max(values))


@dataclass
class RecordingRanks(grpo.RecordingRanks):
    """Ranks of which some have a critic."""

    estimated: list[tuple[dict, float]] = field(default_factory=list)
    whitened: list[tuple[float, float]] = field(default_factory=list)

    def estimate_gae(self, rewards, beta: float) -> tuple[dict[str, Spread], dict[str, float]]:
        self.told.append("estimate_gae")
        self.estimated.append((dict(rewards), beta))
        found = {"advantages": spread(1.0, 2.0, 3.0, 6.0), "returns": spread(0.0, 1.0), "values": spread(0.5)}
        found |= {"rewards": spread(*rewards.values()), "kl": spread(*[KL] * len(rewards))}
        return found, {"timing/kl": 0.0}

    def whiten(self, field: str, mean: float, scale: float) -> None:
        self.told.append(f"whiten {field}")
        self.whitened.append((mean, scale))

    def learn(self, model, minibatch, learning_rate) -> tuple[dict[str, float], str]:
        self.told.append(f"learn {model}")
        self.learned.append({"model": model, "minibatch": minibatch, "learning_rate": learning_rate})
        return {"grad_norm": 1.0 if model == "policy" else 2.0, "update/skipped": 0.0}, ""


@pytest.fixture
def run(drive):  # noqa: F811
    def ppo(steps: int = 1, algorithm=None, **settings) -> grpo.Driven:
        return drive(
            steps=steps, loop=run_ppo, make_ranks=RecordingRanks, algorithm=ALGORITHM | (algorithm or {}), **settings
        )

    return ppo


def minibatches_of(driven: grpo.Driven, model: str) -> list[int]:
    return [learned["minibatch"] for learned in driven.ranks.learned if learned["model"] == model]


def test_a_step_is_rollout_reward_exchange_values_advantages_critic_policy(run):
    driven = run()
    assert driven.told() == [*ROLLOUT, "exchange", *ESTIMATED, "learn critic", "learn policy", *END]
    assert driven.ranks.estimated == [({sample: float(sample % 2) for sample in range(8)}, 0.0)]
    assert driven.ranks.whitened == [(3.0, pytest.approx(1 / math.sqrt(14 / 3 + 1e-8)))]


def test_several_passes_or_minibatches_need_the_policy_before_the_first(run):
    for train in ({"minibatches": 2}, {"epochs": 2}):
        driven = run(train=train, directory=str(train))
        scored = [*ROLLOUT, "exchange", "score policy", *ESTIMATED]
        assert driven.told() == [*scored, *["learn critic"] * 2, *["learn policy"] * 2, *END]


def test_the_mini_batch_that_is_learned_first_needs_no_policy_before_it(run):
    def left_out(name: str, train=None, **algorithm) -> list[int]:
        return run(train={"minibatches": 2} | (train or {}), algorithm=algorithm, directory=name).ranks.left_out

    assert left_out("one") == [1, 0], "of the policy; of the critic"
    assert left_out("again", {"epochs": 2}) == left_out("any", {"shuffle_mini_batch": True}) == [0, 0]
    assert left_out("reward", kl_coefficient=0.1, kl_in_reward=True) == [0, 0, 0]


def test_a_ratio_against_the_rollout_needs_no_policy_before_it_but_a_divergence_in_the_reward_does(run):
    train, rollout = {"minibatches": 2, "epochs": 2}, {"old_logprobs": "rollout"}
    assert "score policy" not in run(train=train, algorithm=rollout, directory="ratio").told()
    in_reward = rollout | {"kl_coefficient": 0.1, "kl_in_reward": True}
    assert "score policy" in run(train=train, algorithm=in_reward, directory="reward").told()


def test_every_epoch_takes_every_minibatch_once(run):
    driven = run(train={"minibatches": 4, "epochs": 3})
    for model in ("critic", "policy"):
        assert minibatches_of(driven, model) == [0, 1, 2, 3] * 3


def test_a_critic_may_take_the_minibatches_more_often_than_the_policy(run):
    driven = run(train={"minibatches": 2}, critic={"epochs": 3})
    assert minibatches_of(driven, "critic") == [0, 1] * 3
    assert minibatches_of(driven, "policy") == [0, 1]


def test_shuffled_minibatches_come_in_an_order_of_the_seed(run):
    train = {"minibatches": 4, "epochs": 6, "shuffle_mini_batch": True}
    found = [minibatches_of(run(steps=2, train=train, directory=name), "critic") for name in ("one", "again")]
    assert found[0] == found[1]
    orders = [tuple(found[0][at : at + 4]) for at in range(0, 48, 4)]
    assert len(orders) == 12 and len(set(orders)) > 6
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    other = run(steps=2, train=train, run={"seed": 2}, directory="other")
    assert minibatches_of(other, "critic") != found[0]


def test_a_divergence_is_a_part_of_the_loss_or_of_the_reward(run):
    in_loss = run(algorithm={"kl_coefficient": 0.1}, directory="loss")
    assert in_loss.told()[5:8] == ["score reference", "score critic", "estimate_gae"]
    assert in_loss.ranks.estimated[0][1] == 0.0 and "kl/beta" not in in_loss.rows[0]
    in_reward = run(algorithm={"kl_coefficient": 0.1, "kl_in_reward": True}, directory="reward")
    assert in_reward.told()[5:9] == ["score policy", "score reference", "score critic", "estimate_gae"]
    assert in_reward.ranks.estimated[0][1] == in_reward.rows[0]["kl/beta"] == 0.1
    assert in_reward.rows[0]["kl/mean"] == KL


ADAPTIVE = {"kl_coefficient": 0.1, "kl_in_reward": True, "kl_control": "adaptive", "kl_target": 0.05}


def betas(driven: grpo.Driven) -> list[float]:
    return [beta for _, beta in driven.ranks.estimated]


def test_an_adaptive_weight_acts_from_the_next_step_on_and_is_in_the_checkpoint(run):
    grown = [0.1 * (1 + 0.2 * 8 / 1000) ** step for step in range(4)]
    whole = run(steps=4, algorithm=ADAPTIVE, directory="whole")
    assert betas(whole) == pytest.approx(grown)
    assert [row["kl/beta"] for row in whole.rows] == betas(whole)
    saving = {"every_steps": 1}
    run(steps=2, algorithm=ADAPTIVE, directory="parts", checkpoint=saving)
    rest = run(steps=4, algorithm=ADAPTIVE, directory="parts", checkpoint=saving)
    assert betas(rest) == betas(whole)[2:], "bit for bit"


def test_in_the_warm_up_the_critic_learns_alone(run):
    driven = run(steps=4, critic={"warmup_steps": 2, "learning_rate": 3e-3, "schedule": "linear"})
    assert [one["model"] for one in driven.ranks.learned] == ["critic"] * 3 + ["policy", "critic", "policy"]
    rates = [one["learning_rate"] for one in driven.ranks.learned if one["model"] == "critic"]
    assert rates == pytest.approx([3e-3 * (4 - step) / 4 for step in range(4)])
    assert [row["critic/lr"] for row in driven.rows] == rates
    for name in ("grad_norm", "timing/update", "update_tps"):
        assert [name in row for row in driven.rows] == [False, False, True, True]


def test_one_sample_a_prompt_is_enough(run):
    driven = run(algorithm={"samples_per_prompt": 1}, reward=lambda step, sample: 1.0)
    assert driven.told()[-4:] == ["learn critic", "learn policy", *END]


def test_the_metrics_have_mindspeeds_names(run):
    driven = run(algorithm={"kl_coefficient": 0.1, "kl_in_reward": True})
    for name in """actor/lr critic/lr actor/grad_norm critic/grad_norm grad_norm critic/score/mean critic/score/max
        critic/score/min critic/rewards/mean critic/rewards/max critic/rewards/min critic/advantages/mean
        critic/advantages/max critic/advantages/min critic/returns/mean critic/returns/max critic/returns/min
        critic/values/mean critic/values/max critic/values/min math_answer_rewards/mean timing/critic_model
        timing/kl timing/update_critic timing/adv timing/update kl/beta critic/explained_variance""".split():
        assert name in driven.rows[0], name
    assert not any(name.startswith("grpo/") for name in driven.rows[0])
    assert (driven.rows[0]["grad_norm"], driven.rows[0]["critic/grad_norm"]) == (1.0, 2.0)
    assert "reward 0.500" in driven.console and "explained -27.00" in driven.console


def test_a_step_in_which_no_group_teaches_trains_nothing_and_the_run_goes_on(run):
    rewards = {"reward": lambda step, sample: float(step and sample % 2)}
    driven = run(steps=2, algorithm={"drop_uniform_groups": True}, **rewards)
    told = driven.told()
    assert told[: len(ROLLOUT + END)] == ROLLOUT + END and told[len(ROLLOUT + END) :] == run(directory="one").told()
    empty, after = driven.rows
    assert "grad_norm" not in empty and after["grad_norm"] == 1.0 and len(driven.ranks.estimated) == 1
