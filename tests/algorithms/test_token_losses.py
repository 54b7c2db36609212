import pytest
import torch
from torch.autograd import gradcheck

from spmd_rl.algorithms.kl import kl_estimate
from spmd_rl.algorithms.policy_loss import clipped_surrogate, token_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def logprobs(n, seed, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    values = -3.0 * torch.rand(n, generator=generator, dtype=torch.float64)
    return values.requires_grad_(requires_grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
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
