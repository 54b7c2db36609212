"""The blocks of a model: how often they wait for the device, and the experts of a layer beside Megatron's own."""

import pytest

from spmd.ranks import run_ranks
from tiny_models import make_tiny

SKEWS = (0.0, 2.0, 100.0)
"""Added to the scores of as many experts as a token has: with the last, the others have nothing."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("blocks")
    return {
        (family, layers): str(make_tiny(root / f"{family}{layers}", family, layers=layers))
        for family, several in {"qwen2": (1, 3), "qwen2_moe": (1, 3)}.items()
        for layers in several
    }


def asked(models, families, recompute=("none",), **parallel):
    return [
        {"model": models[family, layers], "parallel": parallel, "recompute": how}
        for family in families
        for how in recompute
        for layers in (1, 3)
    ]


def replay(models, says=True, share=True, recompute="none", replay=True, **parallel):
    model = models["qwen2_moe", 3]
    return {
        "model": model,
        "parallel": parallel,
        "recompute": recompute,
        "says": says,
        "share": share,
        "replay": replay,
    }


def found_in(ranks, reads=(), skews=(), replays=()):
    asked = {"reads": list(reads), "skews": list(skews), "replays": list(replays)}
    return run_ranks("spmd.block_ranks", ranks, asked)


def logprobs(found, number):
    return {id: values for one in found for id, values in one["replays"][number]["logprobs"].items()}


def apart(one, other):
    assert one.keys() == other.keys() and one
    pairs = ((a, b) for id in one for a, b in zip(one[id], other[id], strict=True))
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def alone(models):
    cases = asked(models, ("qwen2", "qwen2_moe"), ("none", "full"))
    replays = [
        replay(models),
        replay(models, recompute="full"),
        replay(models, share=False),
        replay(models, says=False),
        replay(models, replay=False),  # though samples say them
    ]
    return cases, found_in(1, cases, SKEWS, replays)


def test_a_rank_alone_waits_as_often_for_three_layers_as_for_one(alone):
    cases, (found,) = alone
    totals = [sum(each.values()) for each in found["reads"]]
    for number in range(0, len(totals), 2):
        one, three = totals[number : number + 2]
        dense = "qwen2_moe" not in cases[number]["model"]
        # A host's loop over experts reads the counts, once a layer and pass.
        passes = 1 + (cases[number]["recompute"] == "full")
        assert three - one == (0 if dense else 2 * passes), (cases[number], found["reads"][number : number + 2])


def test_experts_in_one_module_are_those_of_megatron_whoever_has_tokens(alone):
    _, (found,) = alone
    for skew, (empty, *gaps) in zip(SKEWS, found["experts"], strict=True):
        assert max(gaps) < 1e-5, (skew, gaps)
        assert empty == (5 if skew == SKEWS[-1] else 0)


def test_samples_that_say_their_experts_are_sent_there_in_every_pass(alone):
    _, found = alone
    said, again, unshared, silent, off = (logprobs(found, number) for number in range(5))
    assert found[0]["replays"][0]["packs"] > 1, "with one micro-batch none could take another's"
    assert apart(said, again) < 1e-5 and apart(said, unshared) < 1e-5
    # Nothing is replayed where samples say nothing, or where nobody asked for it.
    assert apart(silent, off) < 1e-6 and apart(said, off) > 1e-3
    norms = [one["norm"] for one in found[0]["replays"]]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] == pytest.approx(norms[2], rel=1e-4)
    assert norms[3] == pytest.approx(norms[4], rel=1e-6) and abs(norms[0] - norms[4]) > 1e-3 * norms[4]


def test_the_load_of_the_fullest_expert_is_told(alone):
    _, (found,) = alone
    loads = [one["load"] for one in found["replays"]]
    # A model computed a second time for its backward pass counts its tokens once; none can have more than all of them.
    assert loads[0] == loads[1] and all(1.0 < load <= 4.0 for load in loads)


def test_ranks_that_share_a_model_wait_once_a_layer_of_experts_and_replay_as_one_alone(models, alone):
    layouts = [{"pipeline": 2}, {"context": 2}, {"tensor": 2, "expert": 2}, {"expert": 2}]
    replays = [replay(models, recompute=how, **layout) for layout in layouts for how in ("none", "full")]
    both = found_in(2, asked(models, ("qwen2_moe",), expert=2), replays=replays)
    for found in both:
        one, three = (sum(each.values()) for each in found["reads"])
        assert three - one == 2, found["reads"]
    _, by_one = alone
    for number, case in enumerate(replays):
        assert apart(logprobs(both, number), logprobs(by_one, 0)) < 1e-4, case
        assert both[0]["replays"][number]["norm"] == pytest.approx(by_one[0]["replays"][0]["norm"], rel=1e-4), case
