from types import SimpleNamespace

import pytest
import torch

from spmd_rl.algorithms.table import CORRECTIONS, find_correction, find_loss
from spmd_rl.config.config import AlgorithmConfig

LENGTHS = [3, 1, 4]


def computed(gap=0.0, leave_out=(), own_loss=None, moved=0.1, **settings):
    """Return what the policy's loss says of three samples, and its gradient.

    `gap`: of the trainer to vLLM; `moved`: of the policy since before the update.
    """
    from spmd_rl.training.policy import PolicyLoss

    algorithm = AlgorithmConfig(**settings)
    now = torch.linspace(-3.0, -1.0, 8).requires_grad_()
    before = now.detach() + moved * torch.sin(torch.arange(8.0))
    fields = {
        "advantages": torch.cos(torch.arange(8.0)),
        "weights": torch.full((8,), 0.125),
        "policy_logprobs": before,
        "reference_logprobs": before - 0.3,
        "rollout_logprobs": before - gap * torch.linspace(-1.0, 1.0, 8),
    }
    for name in leave_out:
        del fields[name]
    against_rollout = algorithm.old_logprobs == "rollout"
    policy_loss = PolicyLoss(own_loss or find_loss(algorithm), find_correction(algorithm), against_rollout)
    result = policy_loss(SimpleNamespace(field=fields.get, lengths=LENGTHS), now, torch.zeros(8))
    (gradient,) = torch.autograd.grad(result.total, now)
    return result, gradient


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("name", CORRECTIONS.functions)
def test_where_vllm_and_the_trainer_agree_no_correction_changes_a_bit(name, loss):
    settings = {"loss": loss, "kl_coefficient": 0.1}
    expected, expected_gradient = computed(correction="off", **settings)
    found, gradient = computed(correction=name, **settings)
    assert torch.equal(found.total, expected.total) and torch.equal(gradient, expected_gradient)
    assert found.sums["correction/weight_mean"] == 8 and found.sums["correction/clipped_fraction"] == 0
    assert found.sums["correction/kl"] == 0 and found.maxima["correction/logprob_gap_max"] == 0


def test_a_correction_weighs_the_surrogate_and_not_the_divergence():
    plain, _ = computed(1.0, correction="off", kl_coefficient=0.1)
    found, gradient = computed(1.0, correction="token_mask(low=1, high=1)", kl_coefficient=0.1)
    assert found.sums["actor/pg_loss"] == 0 and found.sums["correction/clipped_fraction"] == 8
    assert found.sums["actor/kl_loss"] == plain.sums["actor/kl_loss"] > 0 and (gradient != 0).all()
    torch.testing.assert_close(found.total, 0.1 * found.sums["actor/kl_loss"])


def test_the_gap_is_told_whatever_is_made_of_it():
    for name in ("off", "token_truncate"):
        found, _ = computed(1.0, correction=name)
        assert found.maxima["correction/logprob_gap_max"] == pytest.approx(1.0)
        assert float(found.sums["correction/kl"]) == pytest.approx(0.0, abs=1e-6)
        assert float(found.sums["correction/weight_mean"]) == (8 if name == "off" else pytest.approx(8.9, abs=0.5))


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "dual_clip", "rloo"])
def test_a_policy_that_has_not_moved_need_not_be_scored(loss):
    settings = {"loss": loss, "kl_coefficient": 0.1, "moved": 0.0}
    scored, scored_gradient = computed(**settings)
    found, gradient = computed(leave_out=["policy_logprobs"], **settings)
    assert torch.equal(found.total, scored.total) and torch.equal(gradient, scored_gradient)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "dual_clip", "rloo"])
def test_a_ratio_against_the_rollout_is_one_against_a_policy_that_agreed_with_vllm(loss):
    settings = {"loss": loss, "kl_coefficient": 0.1}
    agreed, wanted = computed(gap=0.0, **settings)
    found, gradient = computed(gap=0.0, old_logprobs="rollout", **settings)
    assert torch.equal(found.total, agreed.total) and torch.equal(gradient, wanted)
    unscored, gradient = computed(leave_out=["policy_logprobs"], old_logprobs="rollout", **settings)
    assert torch.equal(unscored.total, agreed.total) and torch.equal(gradient, wanted), "no pass before is needed"
    apart, _ = computed(gap=0.5, old_logprobs="rollout", **settings)
    assert apart.sums["actor/ppo_kl"] != agreed.sums["actor/ppo_kl"], "what vLLM says counts"


def test_a_ratio_against_the_rollout_leaves_nothing_to_correct_and_tells_how_far_it_is():
    for correction in ("token_truncate", "sequence_mask", "off"):
        found, _ = computed(0.7, moved=0.0, old_logprobs="rollout", correction=correction)
        assert found.sums["correction/weight_mean"] == 8 and found.sums["correction/clipped_fraction"] == 0
        assert found.sums["correction/kl"] == 0, "it is in actor/ppo_kl: train.kl_bound adds the two"
        assert float(found.maxima["correction/logprob_gap_max"]) == pytest.approx(0.7)
    with pytest.raises(
        ValueError, match="algorithm.old_logprobs: the samples carry no rollout_logprobs.* it to trainer"
    ):
        computed(leave_out=["rollout_logprobs"], old_logprobs="rollout", correction="off")


def test_samples_without_log_probabilities_of_their_writer_cannot_be_corrected():
    with pytest.raises(ValueError, match="algorithm.correction: the samples carry no rollout_logprobs.* set it to off"):
        computed(leave_out=["rollout_logprobs"])
    found, _ = computed(leave_out=["rollout_logprobs"], correction="off")
    assert torch.equal(found.total, computed(correction="off")[0].total)


def test_a_loss_that_asks_where_samples_end_is_told():
    def own(logprobs, old, advantages, reference, entropy, lengths):
        assert lengths == LENGTHS
        return -advantages * logprobs, dict.fromkeys(("pg_loss", "kl_loss", "clipped", "ppo_kl"), logprobs.detach())

    assert computed(own_loss=own)[0].losses.shape == (8,)
