"""A critic is a second learner: exchange, packing, score, learn, switch and checkpoint take it as they are."""

import math

import pytest

from spmd.ranks import run_ranks
from tiny_models import make_tiny

LAYOUTS = [{}, {"pipeline": 2}, {"tensor": 2}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By layout, what each of two ranks says."""
    root = tmp_path_factory.mktemp("learners")
    policy = str(make_tiny(root / "policy", "qwen3"))
    critic = str(make_tiny(root / "critic", "qwen2", layers=3, value_head=True))
    cases = []
    for number, layout in enumerate(LAYOUTS):
        (root / f"checkpoint_{number}").mkdir()
        cases.append(
            {"policy": policy, "critic": critic, "parallel": layout, "checkpoint": str(root / f"checkpoint_{number}")}
        )
    reports = run_ranks("spmd.second_learner_ranks", 2, {"cases": cases})
    return root, [[report["cases"][number] for report in reports] for number in range(len(cases))]


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
            for model, name in (("policy", "actor/pg_loss"), ("critic", "critic/value_loss")):
                expected = summed(first, step, model, name)
                assert summed(ranks, step, model, name) == pytest.approx(expected, rel=1e-3, abs=1e-6)
        moved = [summed(ranks, step, "critic", "critic/value_loss") for step in ("first", "second")]
        assert moved[1] < moved[0]


def test_a_switch_makes_room_of_all_learners(found):
    assert all(rank["switched"] for ranks in found[1] for rank in ranks)


def test_both_go_on_from_a_checkpoint_bit_for_bit(found):
    root, cases = found
    for number, ranks in enumerate(cases):
        for rank in ranks:
            assert rank["saved"] is None
            assert rank["bytes"] and rank["critic_alone"]
            assert rank["resumed"] == rank["second"]
        places = {place.name for place in (root / f"checkpoint_{number}").iterdir() if place.is_dir()}
        assert places == {"training", "training_critic"}
