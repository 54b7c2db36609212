from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.weights.families import hf_shard, megatron_shard, vllm_shard
from spmd_rl.weights.layout import NOTHING, Box, Piece, Shard
from spmd_rl.weights.move import view
from spmd_rl.weights.plan import plan
from tests.weights.models import filled, model_shape, models_and_layouts, numbered


def simulate(plans, sources, destinations):
    """Run all ranks' plans in one process: destination parameters, and how often each element was written."""
    params = [{name: torch.zeros(size) for name, size in shard.params.items()} for shard in destinations]
    writes = [{name: torch.zeros(size) for name, size in shard.params.items()} for shard in destinations]

    def deliver(rank, part, values):
        view(params[rank][part.param], part.at, part.box.shape).copy_(values)
        view(writes[rank][part.param], part.at, part.box.shape).add_(1)

    assert len({len(p.rounds) for p in plans}) == 1
    complete = [[] for _ in plans]
    for steps in zip(*(p.rounds for p in plans), strict=True):
        for rank, step in enumerate(steps):
            for copy in step.local:
                assert copy.source.box == copy.destination.box
                deliver(
                    rank,
                    copy.destination,
                    view(sources[rank][copy.source.param], copy.source.at, copy.source.box.shape),
                )
            assert len({m.peer for m in step.receive}) == len(step.receive)
            for message in step.receive:
                (sent,) = [m for m in steps[message.peer].send if m.peer == rank]
                assert [part.box for part in sent.parts] == [part.box for part in message.parts]
                for there, here in zip(sent.parts, message.parts, strict=True):
                    deliver(rank, here, view(sources[message.peer][there.param], there.at, there.box.shape))
            complete[rank].extend(step.complete)
            for name in step.complete:
                covered = sum(piece.elements for piece in destinations[rank].by_param[name])
                assert writes[rank][name].sum() == covered
    assert [sorted(names) for names in complete] == [sorted(shard.params) for shard in destinations]
    return params, writes


def lacking(source, destination):
    """Elements of the destination whose value is in none of the rank's source tensors."""
    held = torch.cat([values.flatten() for values in source.values()]).unique()
    wanted = torch.cat([values.flatten() for values in destination.values()])
    return int((~torch.isin(wanted[wanted != 0], held)).sum())


@settings(max_examples=60, deadline=None)
@given(models_and_layouts(), st.sampled_from((0, 2, 4)), st.sampled_from((1, 7, 50, 1 << 24)))
def test_every_engine_element_arrives_once_and_only_what_a_rank_lacks_travels(case, ranks_per_node, bucket):
    shape, sizes, rollout = case
    train = TrainLayout(*sizes)
    engines = RolloutLayout(rollout, train.world)
    sources = [megatron_shard(shape, train, rank) for rank in range(train.world)]
    destinations = [vllm_shard(shape, engines, rank) for rank in range(train.world)]
    plans = [plan(sources, destinations, rank, ranks_per_node, bucket) for rank in range(train.world)]
    tensors = numbered(shape)
    held = [filled(shard, tensors) for shard in sources]
    expected = [filled(shard, tensors) for shard in destinations]
    params, writes = simulate(plans, held, destinations)
    for rank in range(train.world):
        for name, values in expected[rank].items():
            torch.testing.assert_close(params[rank][name], values, rtol=0, atol=0)
            assert bool((writes[rank][name] == (values != 0)).all())
        assert plans[rank].received_elements == lacking(held[rank], expected[rank])
        assert plans[rank].local_elements + plans[rank].received_elements == sum(
            p.elements for p in destinations[rank].pieces
        )
        for step in plans[rank].rounds:
            assert sum(part.box.elements for message in step.receive for part in message.parts) <= bucket
    assert sum(p.sent_elements for p in plans) == sum(p.received_elements for p in plans)


@settings(max_examples=15, deadline=None)
@given(models_and_layouts(most_ranks=8), st.sampled_from((5, 1 << 24)))
def test_the_same_mechanism_gathers_a_model_and_turns_one_training_layout_into_another(case, bucket):
    shape, sizes, _ = case
    train = TrainLayout(*sizes)
    tensors = numbered(shape)
    sources = [megatron_shard(shape, train, rank) for rank in range(train.world)]
    held = [filled(shard, tensors) for shard in sources]
    other = TrainLayout(sizes[0], 1, sizes[1] * sizes[2])
    for destinations in (
        [hf_shard(shape)] + [NOTHING] * (train.world - 1),
        [megatron_shard(shape, other, rank) for rank in range(train.world)],
    ):
        plans = [plan(sources, destinations, rank, 0, bucket) for rank in range(train.world)]
        params, _ = simulate(plans, held, destinations)
        for shard, values in zip(destinations, params, strict=True):
            expected = filled(shard, tensors)
            assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_sources_that_overlap_without_being_equal_are_each_used_for_what_they_hold():
    low = Shard({"p": (4, 2)}, (Piece("a", (0, 0), (4, 2), "p", (0, 0)),))
    high = Shard({"p": (4, 2)}, (Piece("a", (2, 0), (4, 2), "p", (0, 0)),))
    want = Shard({"q": (6, 2)}, (Piece("a", (0, 0), (6, 2), "q", (0, 0)),))
    tensors = {"a": torch.arange(1.0, 13).reshape(6, 2)}
    plans = [plan([low, high], [want, want], rank) for rank in range(2)]
    params, _ = simulate(plans, [filled(low, tensors), filled(high, tensors)], [want, want])
    assert all(torch.equal(values["q"], tensors["a"]) for values in params)
    assert [p.received_elements for p in plans] == [4, 4]


def test_experts_stacked_in_one_parameter_arrive_in_their_places():
    sources = [
        Shard(
            {f"experts.{e}": (2, 3) for e in mine},
            tuple(Piece(f"e{e}", (0, 0), (2, 3), f"experts.{e}", (0, 0)) for e in mine),
        )
        for mine in ((0, 1), (2, 3))
    ]
    stacked = Shard({"w13": (4, 2, 3)}, tuple(Piece(f"e{e}", (0, 0), (2, 3), "w13", (e, 0, 0)) for e in range(4)))
    tensors = {f"e{e}": torch.arange(6.0).reshape(2, 3) + 10 * e + 1 for e in range(4)}
    plans = [plan(sources, [stacked, stacked], rank) for rank in range(2)]
    params, _ = simulate(plans, [filled(shard, tensors) for shard in sources], [stacked, stacked])
    assert all(torch.equal(values["w13"], torch.stack(list(tensors.values()))) for values in params)


def test_a_rank_takes_from_its_own_node_when_that_holds_the_part():
    shape, train = model_shape(layers=4), TrainLayout(2, 1, 4)
    sources = [megatron_shard(shape, train, rank) for rank in range(8)]
    destinations = [vllm_shard(shape, RolloutLayout(1, 8), rank) for rank in range(8)]
    for rank in range(8):
        peers = {message.peer for step in plan(sources, destinations, rank, 2).rounds for message in step.receive}
        assert peers == {rank ^ 1}


def test_senders_share_the_work():
    """Sixteen ranks, of which every second holds what the others need."""
    full = hf_shard(model_shape())
    sources = [full if rank % 2 == 0 else NOTHING for rank in range(16)]
    sent = Counter({rank: plan(sources, [full] * 16, rank).sent_elements for rank in range(0, 16, 2)})
    assert set(sent.values()) == {full.elements}


def test_all_pipeline_stages_send_in_the_same_rounds():
    shape, train = model_shape(layers=8), TrainLayout(1, 4, 1)
    sources = [megatron_shard(shape, train, rank) for rank in range(4)]
    destinations = [vllm_shard(shape, RolloutLayout(1, 4), rank) for rank in range(4)]
    steps = plan(sources, destinations, 0, bucket_elements=1500).rounds
    busy = [len(step.receive) for step in steps]
    assert len(busy) > 2 and busy.count(3) >= len(busy) / 2


def test_a_part_that_nobody_holds_is_named():
    half = Shard({"p": (2, 2)}, (Piece("a", (0, 0), (2, 2), "p", (0, 0)),))
    want = Shard({"q": (3, 2)}, (Piece("a", (0, 0), (3, 2), "q", (0, 0)),))
    with pytest.raises(ValueError, match=r"no rank holds all of a\[0:3, 0:2\], which q is made of"):
        plan([half], [want], 0)
    assert str(Box("a", (0, 1), (2, 2))) == "a[0:2, 1:3]"
