"""Generalized advantage estimation, whitening, the value loss and the KL controller, by hand and as laws."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from spmd_rl.algorithms.gae import generalized_advantages, token_rewards
from spmd_rl.algorithms.kl_controller import KlController
from spmd_rl.algorithms.score_normalization import Moments
from spmd_rl.algorithms.token_statistics import Spread, explained_variance, gae_metrics, joined, whitening
from spmd_rl.algorithms.value_loss import clipped_value_loss
from spmd_rl.config.config import AlgorithmConfig

# One response of three tokens, rewarded with 1 at its end.
REWARDS, VALUES = [0.0, 0.0, 1.0], [0.5, 0.25, 0.75]


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_by_one(rewards, values, gamma, lam) -> list[float]:
    """The recursion of a response, in plain numbers."""
    following, advantage, found = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        found.append(advantage)
    return found[::-1]


def test_by_hand():
    # delta = 0.9 * 0.25 - 0.5, 0.9 * 0.75 - 0.25, 1 - 0.75 = -0.275, 0.425, 0.25
    advantages, returns = generalized_advantages(rows(REWARDS), rows(VALUES), gamma=0.9, lam=0.5)
    third = 0.25
    second = 0.425 + 0.45 * third
    first = -0.275 + 0.45 * second
    assert advantages[0].tolist() == pytest.approx([first, second, third])
    assert returns[0].tolist() == pytest.approx([first + 0.5, second + 0.25, third + 0.75])


def test_with_gamma_and_lambda_1_an_advantage_is_the_reward_less_the_value():
    advantages, returns = generalized_advantages(rows(REWARDS), rows(VALUES), gamma=1.0, lam=1.0)
    assert advantages[0].tolist() == pytest.approx([0.5, 0.75, 0.25])
    assert returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_with_lambda_0_an_advantage_is_the_error_of_one_token():
    advantages, _ = generalized_advantages(rows(REWARDS), rows(VALUES), gamma=0.9, lam=0.0)
    assert advantages[0].tolist() == pytest.approx([-0.275, 0.425, 0.25])


numbers = st.floats(-3, 3, allow_subnormal=False)
responses = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6)


@given(st.lists(responses, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_a_sample_gets_what_it_would_get_alone_whatever_it_is_laid_out_with(samples, gamma, lam):
    longest = max(map(len, samples))
    padded = [sample + [(0.0, 0.0)] * (longest - len(sample)) for sample in samples]
    rewards, values = (rows(*[[pair[part] for pair in sample] for sample in padded]) for part in (0, 1))
    advantages, returns = generalized_advantages(rewards, values, gamma, lam)
    for row, sample in enumerate(samples):
        alone = one_by_one([r for r, _ in sample], [v for _, v in sample], gamma, lam)
        assert advantages[row, : len(sample)].tolist() == pytest.approx(alone, abs=1e-9)
        assert not advantages[row, len(sample) :].any()
        assert returns[row, : len(sample)].tolist() == pytest.approx(
            [a + v for a, (_, v) in zip(alone, sample, strict=True)], abs=1e-9
        )


def test_a_reward_is_earned_at_the_last_token_and_a_divergence_at_each():
    kl = rows([0.1, 0.2, 0.3], [0.4, 0.0, 0.0])
    earned = token_rewards(torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([3, 1]), 3, kl, beta=0.5)
    assert earned.tolist() == [pytest.approx([-0.05, -0.1, 0.85]), pytest.approx([-1.2, 0.0, 0.0])]
    plain = token_rewards(torch.tensor([1.0, -1.0]), torch.tensor([3, 1]), 3)
    assert plain.tolist() == [[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]


def test_with_beta_0_a_divergence_that_is_not_finite_is_not_asked():
    kl = torch.full((1, 2), math.inf)
    assert token_rewards(torch.tensor([1.0]), torch.tensor([2]), 2, kl, beta=0.0).tolist() == [[0.0, 1.0]]


def spread(values) -> Spread:
    return Spread(Moments().with_more(values), min(values, default=math.inf), max(values, default=-math.inf))


def test_whitening_by_hand():
    mean, scale = whitening(Moments().with_more([1.0, 2.0, 3.0, 6.0]))
    assert mean == 3.0
    assert scale == pytest.approx(1 / math.sqrt(14 / 3 + 1e-8))  # squares 4 + 1 + 0 + 9, by n - 1


def test_one_token_alone_is_whitened_to_0():
    mean, scale = whitening(Moments().with_more([5.0]))
    assert (5.0 - mean) * scale == 0.0 and math.isfinite(scale)


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5).filter(lambda parts: sum(map(len, parts)) > 1))
def test_whitening_is_the_same_for_any_split_over_ranks(parts):
    together = [number for part in parts for number in part]
    whole, split = spread(together), joined(spread(part) for part in parts)
    assert (split.least, split.most) == (min(together), max(together))
    assert split.moments.count == len(together)
    for one, other in zip(whitening(split.moments), whitening(whole.moments), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)
    mean, scale = whitening(whole.moments)
    moved = spread([(number - mean) * scale for number in together])
    shifted = whole.shifted(mean, scale)
    assert shifted.moments.mean == pytest.approx(moved.moments.mean, abs=1e-6)
    assert (shifted.least, shifted.most) == pytest.approx((moved.least, moved.most), abs=1e-9)


def test_values_that_say_all_explain_all_and_a_constant_explains_nothing():
    returns = [0.0, 1.0, 1.0, 0.0]

    def explained(values):
        errors = [r - v for r, v in zip(returns, values, strict=True)]
        return explained_variance(Moments().with_more(errors), Moments().with_more(returns))

    assert explained(returns) == 1.0
    assert explained([0.7] * 4) == pytest.approx(0.0)
    assert explained([1.0, 0.0, 0.0, 1.0]) < 0
    assert math.isnan(explained_variance(Moments(), Moments()))


def test_the_metrics_have_whitened_advantages():
    found = {name: spread([1.0, 2.0, 3.0, 6.0]) for name in ("advantages", "returns", "values", "rewards", "kl")}
    metrics = gae_metrics(found)
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0)
    assert metrics["critic/advantages/max"] == pytest.approx(3 / math.sqrt(14 / 3))
    assert metrics["critic/returns/max"] == 6.0 and metrics["critic/rewards/mean"] == 3.0
    assert metrics["critic/explained_variance"] == 0.0


def test_the_metrics_of_clipped_advantages_are_of_those_that_the_loss_takes():
    from spmd_rl.distributed.sample import Sample
    from spmd_rl.worker.gae_estimator import GaeEstimator

    found = {name: spread([1.0, 2.0, 3.0, 6.0]) for name in ("advantages", "returns", "values", "rewards", "kl")}
    told = []
    for reports, numbers in ((True, [1.0, 2.0]), (True, [3.0, 6.0]), (False, [3.0, 6.0]), (True, [])):
        one = Sample.of(0, torch.tensor([1]), torch.tensor([1] * len(numbers)), advantages=torch.tensor(numbers))
        config = SimpleNamespace(algorithm=AlgorithmConfig(advantage="gae", advantage_clip=1.0))
        place = SimpleNamespace(reports=reports)
        told += GaeEstimator(SimpleNamespace(config=config, place=place, samples={0: one})).whiten("advantages", 3, 0.5)
        assert one.fields["advantages"].tolist() == [min((number - 3) / 2, 1.0) for number in numbers]
    metrics = gae_metrics(found, joined(map(Spread.of, told)))
    names = [f"critic/advantages/{name}" for name in ("min", "mean", "max")]
    assert [metrics[name] for name in names] == [-1.0, pytest.approx(-0.125), 1.0], "of -1, -0.5, 0 and 1"
    assert metrics["critic/explained_variance"] == gae_metrics(found)["critic/explained_variance"], "as they were"


def test_the_value_loss_by_hand():
    values, before, returns = (torch.tensor(x) for x in ([1.0, 0.0, 2.0], [0.0, 0.0, 1.9], [2.0, 1.0, 1.0]))
    # Moved by 1 towards the return, which is too far: clipped to 0.5. Not moved. Moved away from it, a little.
    loss, clipped = clipped_value_loss(values, before, returns, value_clip=0.5)
    assert loss.tolist() == pytest.approx([0.5 * 1.5**2, 0.5, 0.5])
    assert clipped.tolist() == [True, False, False]
    assert clipped_value_loss(values, before, returns)[0].tolist() == [0.5, 0.5, 0.5]


def test_a_clipped_value_gets_no_gradient_and_the_others_the_plain_ones():
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    loss, _ = clipped_value_loss(values, torch.zeros(2), torch.tensor([2.0, 2.0]), value_clip=0.5)
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.1 - 2.0])


def test_the_gradient_of_the_value_loss_is_its_derivative():
    draw = torch.Generator().manual_seed(0)
    values, before, returns = (torch.randn(32, generator=draw, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    for clip in (0.0, 0.3):
        assert gradcheck(lambda new, clip=clip: clipped_value_loss(new, before, returns, value_clip=clip)[0], values)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.floats(0.01, 2))
def test_clipping_never_makes_the_value_loss_smaller(tokens, clip):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    plain, none = clipped_value_loss(*columns)
    loss, clipped = clipped_value_loss(*columns, value_clip=clip)
    assert (loss >= plain).all() and not none.any()
    assert torch.equal(clipped, loss > plain)


def test_a_fixed_weight_stays():
    control = KlController(0.01)
    control.update(50.0, 1000)
    assert control.beta == 0.01 and control.state_dict() == {}


def test_the_path_of_an_adaptive_weight_by_hand():
    control = KlController(0.1, target=0.05, horizon=1000)
    control.update(0.05, 100)  # on target
    assert control.beta == 0.1
    control.update(0.055, 100)  # a tenth above it
    assert control.beta == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    control.update(5.0, 100)  # far above: no more than a fifth
    assert control.beta == pytest.approx(0.1 * 1.01 * 1.02)
    control.update(0.0, 500)  # far below
    assert control.beta == pytest.approx(0.1 * 1.01 * 1.02 * 0.9)
    before = control.beta
    control.update(math.nan, 500)
    control.update(math.inf, 500)
    assert control.beta == before


def test_an_adaptive_weight_goes_on_from_where_it_was():
    control = KlController(0.1, target=0.05, horizon=1000)
    control.update(1.0, 100)
    again = KlController(0.1, target=0.05, horizon=1000)
    again.load_state_dict(control.state_dict())
    assert again == control
    again.load_state_dict({})  # of a run that had none
    assert again == control
