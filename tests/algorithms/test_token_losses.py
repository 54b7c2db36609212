import math

import pytest
import torch
from torch.autograd import gradcheck

from spmd_rl.algorithms.kl import kl_estimate, sample_kl, token_rewards_with_kl
from spmd_rl.algorithms.policy_loss import clipped_surrogate, dual_clip_surrogate, gspo_surrogate, token_loss
from spmd_rl.algorithms.table import LOSSES, find_loss
from spmd_rl.config.config import AlgorithmConfig

LENGTHS = [3, 0, 5, 1, 7]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def logprobs(n, seed, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    values = -3.0 * torch.rand(n, generator=generator, dtype=torch.float64)
    return values.requires_grad_(requires_grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_the_gradient_of_each_kl_estimate_is_its_derivative(kind):
    assert gradcheck(lambda new: kl_estimate(new, logprobs(16, 1), kind), logprobs(16, 0, requires_grad=True))


def test_the_gradient_of_the_whole_loss_is_its_derivative():
    old, reference, entropy = logprobs(32, 1), logprobs(32, 2), logprobs(32, 4, requires_grad=True)
    advantages = logprobs(32, 3) + 1.5
    config = CLIP | dict(kl_coefficient=0.1, entropy_coefficient=0.01)

    def loss(new, entropy):
        return token_loss(new, old, advantages, reference, entropy, **config)[0]

    assert gradcheck(loss, (logprobs(32, 0, requires_grad=True), entropy))


def test_k3_is_never_negative_and_zero_only_where_the_models_agree():
    for dtype, gap in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        d = torch.cat([torch.linspace(-20, 20, 4001, dtype=dtype), torch.linspace(-1e-3, 1e-3, 4001, dtype=dtype)])
        k3 = kl_estimate(torch.zeros_like(d), d, "k3")
        assert (k3 >= -gap * d.abs()).all()
        assert (k3[d.abs() > 0.01] > 0).all()
    same = logprobs(8, 0)
    assert torch.equal(kl_estimate(same, same, "k3"), torch.zeros_like(same))


def test_k1_and_k3_average_to_the_divergence_of_two_distributions():
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.2, 0.1, -0.4], dtype=torch.float64), 0)
    true_kl = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), true_kl)


def test_the_expected_gradient_of_k2_is_the_gradient_of_the_divergence():
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.2, 0.1, -0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((policy.exp().detach() * kl_estimate(policy, reference, "k2")).sum(), logits)
    torch.testing.assert_close(gradient, true_gradient)


@pytest.mark.parametrize(
    "advantage, ratio, is_clipped",
    [
        (1.0, 1.31, True),  # good and already likelier: enough
        (1.0, 1.29, False),
        (1.0, 0.5, False),  # good but less likely than before: pull back up
        (-1.0, 0.79, True),  # bad and already unlikelier: enough
        (-1.0, 0.81, False),
        (-1.0, 2.0, False),  # bad and likelier: push down, however far
        (0.0, 2.0, False),
    ],
)
def test_clipping_stops_the_gradient_only_where_the_update_went_far_enough(advantage, ratio, is_clipped):
    new = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss, clipped = clipped_surrogate(new, torch.zeros_like(new), torch.tensor([advantage]).double(), 0.2, 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert clipped.tolist() == [is_clipped]
    expected = 0.0 if is_clipped else -advantage * ratio
    assert gradient.item() == pytest.approx(expected)
    bound = 1.3 if advantage > 0 else 0.8
    assert loss.item() == pytest.approx(-advantage * (bound if is_clipped else ratio))


def test_before_any_update_the_gradient_is_that_of_reinforce():
    new, advantages = logprobs(16, 0, requires_grad=True), logprobs(16, 1) + 1.0
    loss, parts = token_loss(new, new.detach(), advantages, None, None, **CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -advantages)
    assert not parts["clipped"].any() and not parts["ppo_kl"].any() and not parts["kl_loss"].any()


def test_the_parts_carry_no_gradient_and_add_up_to_the_loss():
    new, old, reference, entropy = (logprobs(16, seed, requires_grad=True) for seed in range(4))
    config = CLIP | dict(kl_coefficient=0.5, entropy_coefficient=0.25)
    loss, parts = token_loss(new, old.detach(), torch.ones_like(new).detach(), reference.detach(), entropy, **config)
    assert set(parts) == {"pg_loss", "kl_loss", "clipped", "ppo_kl"}
    assert all(not part.requires_grad and part.shape == (16,) for part in parts.values())
    torch.testing.assert_close(loss, parts["pg_loss"] + 0.5 * parts["kl_loss"] - 0.25 * entropy)
    torch.testing.assert_close(parts["ppo_kl"], (old - new).detach())


def test_the_divergence_is_reported_even_when_it_is_no_part_of_the_loss():
    new, old, reference = (logprobs(16, seed) for seed in range(3))
    loss, parts = token_loss(new, old, torch.ones_like(new), reference, None, **CLIP, kl_coefficient=0.0)
    assert (parts["kl_loss"] > 0).all() and torch.equal(loss, parts["pg_loss"])


def test_a_term_that_is_asked_for_but_cannot_be_computed_is_named():
    new = logprobs(4, 0)
    with pytest.raises(ValueError, match="algorithm.kl_coefficient = 0.1"):
        token_loss(new, new, new, None, None, **CLIP, kl_coefficient=0.1)
    with pytest.raises(ValueError, match="algorithm.entropy_coefficient = 0.1"):
        token_loss(new, new, new, None, None, **CLIP, entropy_coefficient=0.1)
    with pytest.raises(ValueError, match="algorithm.kl_estimator = 'k4'"):
        kl_estimate(new, new, "k4")


@pytest.mark.parametrize("alias, kind", [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_an_estimator_goes_by_the_name_that_others_gave_it(alias, kind):
    new, reference = logprobs(8, 0), logprobs(8, 1)
    assert torch.equal(kl_estimate(new, reference, alias), kl_estimate(new, reference, kind))


def test_the_divergence_in_the_reward_is_a_price_without_gradient():
    new, reference = logprobs(16, 0, requires_grad=True), logprobs(16, 1)
    d = (new - reference).detach()
    rewards = token_rewards_with_kl(torch.ones(16, dtype=torch.float64), new, reference, 0.5, "k1")
    torch.testing.assert_close(rewards, 1.0 - 0.5 * d)
    sums = sample_kl(new, reference, LENGTHS, "abs")
    assert not rewards.requires_grad and not sums.requires_grad
    assert sums.tolist() == pytest.approx([part.abs().sum().item() for part in d.split(LENGTHS)])


def loss_of(name, **settings):
    """Return a loss of the table on samples of LENGTHS, or of others."""
    loss = find_loss(AlgorithmConfig(loss=name, **CLIP | settings))

    def of(new, old, advantages, lengths=None):
        return loss(new, old, advantages, None, None, lengths=lengths or LENGTHS)

    return of


def of_samples(seed, dtype=torch.float64):
    """Return log-probabilities now and before, and advantages of samples spread over their tokens."""
    new, old = logprobs(16, seed), logprobs(16, seed) + 0.6 * (logprobs(16, seed + 1) + 1.5)
    advantages = torch.repeat_interleave(logprobs(5, seed + 2) + 1.5, torch.tensor(LENGTHS))
    return new.to(dtype), old.to(dtype), advantages.to(dtype)


@pytest.mark.parametrize("name", LOSSES.functions)
def test_the_gradient_of_every_loss_is_its_derivative_where_it_has_one(name):
    new, old, advantages = of_samples(0)
    if name == "cispo":
        new.requires_grad_()
        loss, parts = loss_of(name)(new, old, advantages)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        weight = (new - old).exp().detach().clamp(0.8, 1.3)
        assert 0 < parts["clipped"].sum() < 16
        return torch.testing.assert_close(gradient, -weight * advantages)
    assert gradcheck(lambda new: loss_of(name)(new, old, advantages)[0], new.requires_grad_())


@pytest.mark.parametrize("name", LOSSES.functions)
def test_before_any_update_the_gradient_of_every_loss_is_that_of_reinforce(name):
    new, _, advantages = of_samples(0)
    new.requires_grad_()
    loss, parts = loss_of(name)(new, new.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    # The ratio of a whole response is differentiated at each of its tokens; sequence_mean divides by their number.
    times = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS)) if name == "rloo" else 1
    torch.testing.assert_close(gradient, -advantages * times)
    assert not parts["clipped"].any()


@pytest.mark.parametrize("name", LOSSES.functions)
def test_no_loss_depends_on_the_order_of_the_samples_or_on_what_else_is_packed_with_one(name):
    new, old, advantages = of_samples(3)
    whole, _ = loss_of(name)(new, old, advantages)
    parts = [list(tensor.split(LENGTHS)) for tensor in (new, old, advantages)]
    order = [4, 2, 0, 3, 1]
    shuffled, _ = loss_of(name)(*(torch.cat([part[i] for i in order]) for part in parts), [LENGTHS[i] for i in order])
    torch.testing.assert_close(shuffled, torch.cat([whole.split(LENGTHS)[i] for i in order]), rtol=0, atol=0)
    for i, length in enumerate(LENGTHS):
        alone, _ = loss_of(name)(*(part[i] for part in parts), [length])
        torch.testing.assert_close(alone, whole.split(LENGTHS)[i], rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES.functions)
def test_every_loss_grows_with_the_advantage_so_that_its_weight_is_the_losss(name):
    new, old, advantages = of_samples(5)
    weights = torch.linspace(0, 3, 16, dtype=torch.float64)
    weighted, _ = loss_of(name)(new, old, weights * advantages)
    torch.testing.assert_close(weighted, weights * loss_of(name)(new, old, advantages)[0])
    assert weighted[0] == 0.0


@pytest.mark.parametrize("name", LOSSES.functions)
def test_a_log_probability_that_is_no_number_is_seen_in_the_loss(name):
    new, old, advantages = of_samples(0)
    new[4] = torch.nan
    loss, _ = loss_of(name)(new, old, advantages)
    # It stays in its sample: the others' losses are theirs.
    assert loss[4].isnan() and loss[:3].isfinite().all() and loss[8:].isfinite().all()


def test_dual_clip_bounds_the_loss_where_the_ratio_of_a_bad_token_has_exploded():
    new = torch.tensor([2.0, 5.0, 5.0], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    loss, clipped = dual_clip_surrogate(new, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, clip_dual=3.0)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.tolist() == pytest.approx([2.0, 3.0, -1.2]) and clipped.tolist() == [False, True, True]
    assert gradient.tolist() == pytest.approx([2.0, 0.0, 0.0])


def test_gspo_clips_a_response_as_a_whole_by_the_mean_of_its_tokens():
    new = torch.tensor([0.5, -0.1, 0.2, 0.1], dtype=torch.float64)
    loss, clipped = gspo_surrogate(new, torch.zeros(4), torch.ones(4), 0.1, 0.1, lengths=[2, 2])
    mean = [math.exp(0.2), math.exp(0.15)]
    assert clipped.tolist() == [True, True, True, True] and mean[1] > 1.1
    assert loss.tolist() == pytest.approx([-1.1] * 4)
    loss, clipped = gspo_surrogate(new, torch.zeros(4), torch.ones(4), 0.1, 0.2, lengths=[2, 2])
    assert clipped.tolist() == [True, True, False, False]
    assert loss.tolist() == pytest.approx([-1.2] * 2 + [-mean[1]] * 2)


def test_the_ratio_of_a_very_long_response_stays_finite():
    new = torch.full((400,), 0.5, dtype=torch.float32).requires_grad_()
    loss, _ = loss_of("rloo")(new, torch.zeros(400), -torch.ones(400), [400])
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all() and gradient.isfinite().all()
