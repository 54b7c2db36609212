"""Faults that other trainers of this kind have had, each tried on ours; the links tell of theirs."""

from types import SimpleNamespace

import pytest
import torch

from spmd_rl.algorithms.advantage import group_advantages
from spmd_rl.algorithms.gae import token_rewards
from spmd_rl.algorithms.kl import kl_estimate, sample_kl
from spmd_rl.algorithms.kl_controller import KlController
from spmd_rl.algorithms.reduce import fixed_length, token_mean
from spmd_rl.algorithms.table import ADVANTAGES, find_correction, find_loss
from spmd_rl.algorithms.token_statistics import Spread, joined, whitening
from spmd_rl.config.config import AlgorithmConfig

GARBAGE = 1e6
"""Where nobody should look."""
MASKS = {0: [1, 1, 0, 0, 1], 1: [1, 0], 2: [1, 1, 1], 3: [0, 0]}
"""By sample: 0 where a tool wrote the token, say."""
TOKENS = 7


def sample(id: int, **fields: float):
    """Return a sample whose fields are numbers of its own at the loss tokens, and garbage elsewhere."""
    from spmd_rl.distributed.sample import Sample

    mask = torch.tensor(MASKS[id], dtype=torch.bool)
    one = Sample(id, torch.arange(3 + len(mask)) + 10 * id, 3, mask)
    for name, number in fields.items():
        one.fields[name] = torch.where(mask, number + torch.arange(len(mask)) / 10, GARBAGE)
    return one


def packed(*samples):
    from spmd_rl.training.packing import pack

    return pack([[one] for one in samples], 1, False, torch.device("cpu"))


def estimated(*ranks: list[int]):
    """Estimate GAE on so many ranks, each with these samples; returns the samples, and what whitens them."""
    from spmd_rl.worker.gae_estimator import GaeEstimator

    config, samples, estimators, spreads = SimpleNamespace(algorithm=AlgorithmConfig(advantage="gae")), {}, [], []
    for ids in ranks:
        here = {id: sample(id, values=id * 0.3) for id in ids}
        trainer = SimpleNamespace(config=config, samples=here, place=SimpleNamespace(reports=True))
        estimators.append(GaeEstimator(trainer))
        told = estimators[-1].estimate_gae(dict.fromkeys(ids, 1.0), 0.0).told
        spreads += [Spread.of(one["advantages"]) for one in told]
        samples |= here
    whole = joined(spreads)
    for estimator in estimators:
        estimator.whiten("advantages", *whitening(whole.moments))
    return samples, whole


def test_advantages_are_whitened_over_loss_tokens_alone():
    """https://github.com/NovaSky-AI/SkyRL/issues/1305: the mean was taken over padding too."""
    samples, whole = estimated([0, 1, 2, 3])
    advantages = torch.cat([one.at_loss_tokens("advantages") for one in samples.values()])
    assert whole.moments.count == TOKENS == len(advantages)
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6) and float(advantages.var()) == pytest.approx(1.0)


def test_a_rank_without_loss_tokens_is_whitened_with_the_others():
    """https://github.com/radixark/miles/pull/3229: an empty shard left a collective out."""
    samples, _ = estimated([0, 1, 2, 3])
    for ranks in ([[0], [1, 2], [3]], [[], [3, 2, 1, 0]]):
        split, _ = estimated(*ranks)
        for id, one in samples.items():
            torch.testing.assert_close(split[id].fields["advantages"], one.fields["advantages"])
    assert packed(*samples.values()).field("advantages").shape == (TOKENS,), "one without loss tokens has the field"


def test_a_reward_is_earned_at_the_last_loss_token_whatever_a_tool_wrote_after_it():
    samples, _ = estimated([1])  # its last token is not the policy's
    assert samples[1].fields["returns"].tolist() == [1.0, 0.0]
    assert token_rewards(torch.tensor([1.0]), torch.tensor([2]), 4).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_values_go_to_the_tokens_they_are_of_whatever_the_order_in_a_micro_batch(order):
    """https://github.com/verl-project/verl/pull/1440: values were reordered, and their mask was not."""
    samples = {id: sample(id, values=id) for id in order}
    whole = packed(*samples.values())
    whole.put("found", whole.field("values"))
    for one in samples.values():
        assert torch.equal(one.at_loss_tokens("found"), one.at_loss_tokens("values"))
        assert float(one.fields["found"].max()) < GARBAGE


def total(*packs, **settings) -> float:
    from spmd_rl.training.policy import PolicyLoss

    algorithm = AlgorithmConfig(correction="off", **settings)
    loss = PolicyLoss(find_loss(algorithm), find_correction(algorithm))
    return sum(float(loss(one, one.field("now"), one.field("now")).total) for one in packs)


def learned(weights: list[float], moved: float = 0.0):
    """Return samples with what a loss reads; the policy has moved by so much since they were written."""
    given = [sample(id, advantages=1.0 - id, policy_logprobs=-1.0, now=-1.0 + moved) for id in (0, 1, 2)]
    for one, weight in zip(given, weights, strict=True):
        one.put("weights", weight)
    return given


def test_a_mean_over_tokens_is_that_of_the_batch_however_it_is_cut_into_micro_batches():
    """https://github.com/huggingface/trl/issues/3021: each micro-batch had a mean of its own;
    https://github.com/modelscope/ms-swift/issues/10117: the loss was divided by their number once more."""
    first, second, third = learned(token_mean([3, 1, 3]))
    whole = total(packed(first, second, third))
    assert total(packed(first), packed(second, third)) == pytest.approx(whole)
    assert total(packed(third), packed(second), packed(first)) == pytest.approx(whole)
    by_hand = sum(float(one.at_loss_tokens("advantages").sum()) for one in (first, second, third))
    assert whole == pytest.approx(-by_hand / TOKENS)


def test_the_ratio_is_to_the_policy_that_wrote_the_samples_not_to_the_one_of_now():
    """https://github.com/inclusionAI/AReno/issues/68: with several epochs the ratio was 1, and nothing was clipped."""
    first, *_ = learned([1.0] * 3, moved=0.1)
    expected = -float((torch.tensor(0.1).exp() * first.at_loss_tokens("advantages")).sum())
    assert total(packed(first)) == pytest.approx(expected)


def test_a_response_is_clipped_by_its_own_tokens():
    """https://github.com/areal-project/AReaL/pull/1346: tokens that are masked entered a response's ratio."""
    given = learned([1.0] * 3, moved=0.1)
    settings = {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2}
    alone = sum(total(packed(one), **settings) for one in given)
    assert abs(alone) < GARBAGE and total(packed(*given), **settings) == pytest.approx(alone)


def test_a_policy_that_left_its_reference_pays_for_it():
    """https://github.com/huggingface/trl/issues/463: which way round the divergence in the reward is."""
    surer, reference = torch.tensor([-0.1, -0.2]), torch.tensor([-1.0, -1.0])
    kl = kl_estimate(surer, reference, "k1")
    assert (token_rewards(torch.zeros(1), torch.tensor([2]), 2, kl[None], 0.5) < 0).all()
    control = KlController(0.5, 0.01, 1000.0)
    control.update(float(kl.mean()), 100)
    assert control.beta > 0.5, "further away than the target: it weighs more"


def test_a_response_pays_the_sum_of_its_tokens_divergences_once():
    """https://github.com/huggingface/trl/pull/2575: a reward was paid at each token of a divergence's mask."""
    now, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.5, -1.0])
    assert sample_kl(now, reference, [2, 1], "k1").tolist() == pytest.approx([1.5, -2.0])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_log_probabilities_are_of_the_temperature_that_samples_were_drawn_with(temperature):
    """https://github.com/huggingface/trl/issues/4159: the ratio of the first token was 2."""
    from spmd_rl.training.token_logprobs import token_logprobs

    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.tensor([0, 3, 10, 4, 4])
    found, _ = token_logprobs(hidden, weight, targets, temperature, 0, None, 2)
    expected = torch.log_softmax(hidden @ weight.T / temperature, -1)[torch.arange(5), targets]
    torch.testing.assert_close(found, expected)


def test_a_group_is_the_samples_of_its_prompt_wherever_and_however_many_they_are():
    """https://github.com/areal-project/AReaL/issues/1419: groups were so many samples in a row."""
    groups, rewards = [7, 3, 7, 9, 3, 7], [1.0, 0.0, 0.0, 5.0, 1.0, 0.5]
    found = group_advantages(groups, rewards)
    for group in set(groups):
        members = [i for i, one in enumerate(groups) if one == group]
        alone = group_advantages([group] * len(members), [rewards[i] for i in members])
        assert [found[i] for i in members] == alone


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.functions) - {"rloo", "remax"}))
def test_a_sample_that_is_alone_gets_a_number(name):
    """https://github.com/huggingface/trl/pull/5773: the deviation of one number is nan."""
    found = ADVANTAGES.find(name)([0, 1, 1], [3.0, 1.0, 1.0], **({"tokens": [1, 2, 2]} if "plus" in name else {}))
    assert all(abs(one) < 10 for one in found)


def test_a_long_response_gets_no_smaller_a_gradient_a_token_than_a_short_one():
    """https://arxiv.org/abs/2503.20783: long wrong answers were punished less, token by token."""
    assert len(set(fixed_length([1, 50, 8], 64))) == 1
    assert len(set(token_mean([1, 50, 8]))) == 1
