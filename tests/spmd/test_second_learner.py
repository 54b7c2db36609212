"""A critic is a second learner: exchange, packing, score, learn, switch and checkpoint take it as they are.

Its values, PPO's advantages, and the value loss with its gradient are those of transformers and plain numbers.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from spmd.ranks import run_ranks
from spmd.samples import advantages_of, make_samples
from spmd.second_learner_ranks import BETA, shift
from tiny_models import make_tiny

LAYOUTS = [{}, {"pipeline": 2}, {"tensor": 2}, {"context": 2}]
GAMMA, LAM, CLIP = 0.9, 0.8, 0.3
ALGORITHM = {"gamma": GAMMA, "lam": LAM, "value_clip": CLIP}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By layout, what each of two ranks says."""
    root = tmp_path_factory.mktemp("learners")
    policy = str(make_tiny(root / "policy", "qwen3"))
    critic = str(make_tiny(root / "critic", "qwen2", layers=3, value_head=True))
    expected = alone(critic)
    torch.save(expected.gradients, root / "gradients.pt")
    common = {"policy": policy, "critic": critic, "algorithm": ALGORITHM, "gradients": str(root / "gradients.pt")}
    cases = []
    for number, layout in enumerate(LAYOUTS):
        (root / f"checkpoint_{number}").mkdir()
        cases.append(common | {"parallel": layout, "checkpoint": str(root / f"checkpoint_{number}")})
    reports = run_ranks("spmd.second_learner_ranks", 2, {"cases": cases})
    return root, [[report["cases"][number] for report in reports] for number in range(len(cases))], expected


def alone(path: str) -> SimpleNamespace:
    """Return what transformers and plain numbers say of all samples."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    samples, _ = make_samples(model.config.vocab_size)
    rewards, fields, losses = advantages_of(samples), {}, []
    for id, sample in samples.items():
        if not sample.loss_tokens:
            continue
        hidden = model.model(sample.tokens[None]).last_hidden_state[0]
        values = (hidden @ model.score.weight.T)[sample.prompt_tokens - 1 : -1, 0][sample.loss_mask]
        # The reference is the policy: what they differ in is what spmd.samples.perturb did to both.
        d = (-0.7 * torch.sin(torch.arange(len(sample.response)) + id))[sample.loss_mask]
        earned = -BETA * (torch.expm1(d) - d)
        earned[-1] += rewards[id]
        advantage, following, advantages = 0.0, 0.0, []
        for reward, value in zip(reversed(earned.tolist()), reversed(values.tolist()), strict=True):
            advantage = reward + GAMMA * following - value + GAMMA * LAM * advantage
            following = value
            advantages.insert(0, advantage)
        returns = torch.tensor(advantages) + values.detach()
        before = values.detach() + shift(sample)[sample.loss_mask]
        near = torch.clamp(values, before - CLIP, before + CLIP)
        losses.append(0.5 * torch.maximum((values - returns).square(), (near - returns).square()))
        fields[id] = {"values": values.tolist(), "advantages": advantages, "returns": returns.tolist()}
    loss = torch.cat(losses).mean()
    loss.backward()
    loss = loss.detach()
    every = torch.tensor([one for field in fields.values() for one in field["advantages"]], dtype=torch.float64)
    for field in fields.values():
        field["advantages"] = [float((one - every.mean()) / (every.var() + 1e-8).sqrt()) for one in field["advantages"]]
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return SimpleNamespace(fields=fields, loss=float(loss), gradients=gradients, tokens=len(every))


def test_values_advantages_and_returns_are_those_of_transformers_and_plain_numbers_in_every_layout(found):
    for layout, ranks in zip(LAYOUTS, found[1], strict=True):
        fields = {int(id): field for rank in ranks for id, field in rank["fields"].items()}
        assert fields.keys() == found[2].fields.keys(), layout
        for id, expected in found[2].fields.items():
            for name, numbers in expected.items():
                assert fields[id][name] == pytest.approx(numbers, abs=2e-4), (layout, id, name)
        told = ranks[0]["told"]
        assert all(rank["told"] == told for rank in ranks), "whatever stage or rank, one whitening"
        assert told["advantages"]["moments"]["count"] == told["values"]["moments"]["count"] == found[2].tokens
        assert told["kl"]["moments"]["count"] == told["rewards"]["moments"]["count"] == len(fields)


def test_the_value_loss_and_its_gradient_are_those_of_a_plain_critic_in_every_layout(found):
    for layout, ranks in zip(LAYOUTS, found[1], strict=True):
        assert summed(ranks, "first", "critic", "critic/vf_loss") == pytest.approx(found[2].loss, rel=1e-4), layout
        assert 0 < summed(ranks, "first", "critic", "critic/vf_clipfrac") < found[2].tokens, "the case is too easy"
        gaps: dict[str, float] = {}
        for rank in ranks:
            for name, gap in rank["gradients"].items():
                gaps[name] = max(gaps.get(name, 0.0), gap)
        assert gaps.keys() == found[2].gradients.keys()
        assert max(gaps.values()) < 1e-4, (layout, sorted(gaps.items(), key=lambda item: -item[1])[:9])


def test_learners_take_turns_on_the_device(found):
    assert all(
        rank["moves"] == [["critic_onload", "policy_offload"], ["critic_offload", "policy_onload"]]
        for ranks in found[1]
        for rank in ranks
    )


def summed(ranks: list[dict], step: str, model: str, name: str) -> float:
    return sum(rank[step][model]["sums"].get(name, 0.0) for rank in ranks)


def test_fields_of_any_shape_go_where_their_sample_is_trained_on(found):
    assert all(rank["images"] for ranks in found[1] for rank in ranks)


def test_what_the_policy_did_not_write_weighs_nothing(found):
    for ranks in found[1]:
        assert all(rank["masked"] for rank in ranks)
        for model in ("policy", "critic"):
            assert summed(ranks, "first", model, "tokens") == ranks[0]["loss_tokens"]
            assert all(math.isfinite(rank["first"][model]["grad_norm"]) for rank in ranks)
        assert math.isfinite(summed(ranks, "first", "policy", "correction/logprob_gap_mean"))


def test_both_learners_learn_the_same_in_every_layout(found):
    first = found[1][0]
    for ranks in found[1]:
        assert any(rank["values"] for rank in ranks)
        for step in ("first", "second"):
            for model, name in (("policy", "actor/pg_loss"), ("critic", "critic/vf_loss")):
                expected = summed(first, step, model, name)
                assert summed(ranks, step, model, name) == pytest.approx(expected, rel=1e-3, abs=1e-6)
        moved = [summed(ranks, step, "critic", "critic/vf_loss") for step in ("first", "second")]
        assert moved[1] < moved[0]


def test_a_switch_makes_room_of_all_learners(found):
    assert all(rank["switched"] for ranks in found[1] for rank in ranks)


def test_both_go_on_from_a_checkpoint_bit_for_bit(found):
    root, cases, _ = found
    for number, ranks in enumerate(cases):
        for rank in ranks:
            assert rank["saved"] is None
            assert rank["bytes"] and rank["critic_alone"] and rank["policy_alone"]
            assert rank["resumed"] == rank["second"]
        places = {place.name for place in (root / f"checkpoint_{number}").iterdir() if place.is_dir()}
        assert places == {"training", "training_critic"}
