import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.plan.refresh_stats import refresh_stats
from spmd_rl.weights.families import hf_shard, megatron_shard, vllm_shard
from spmd_rl.weights.transfer.boxes import NOTHING, Box, Piece, Shard, view, whole
from spmd_rl.weights.transfer.transfer_schedule import Schedule, bucket_of_bytes
from tests.weights.models import (
    copied_elements,
    filled,
    model_shape,
    models_and_layouts,
    moves,
    numbered,
    received_elements,
    sent_elements,
)


def simulate(plans, sources, destinations):
    """Run all ranks' plans in one process: destination parameters, and how often each element was written."""
    params = [{name: np.zeros(size) for name, size in shard.params.items()} for shard in destinations]
    writes = [{name: np.zeros(size) for name, size in shard.params.items()} for shard in destinations]

    def deliver(rank, part, values):
        view(params[rank][part.param], part.at, part.shape)[...] = values
        view(writes[rank][part.param], part.at, part.shape)[...] += 1

    def taken(rank, part):
        return view(sources[rank][part.param], part.at, part.shape)

    assert len({len(p.rounds) for p in plans}) == 1
    complete = [[] for _ in plans]
    for steps in zip(*(p.rounds for p in plans), strict=True):
        sent = {(rank, peer): pieces for rank, step in enumerate(steps) for peer, pieces in step.send.items()}
        received = {(peer, rank): pieces for rank, step in enumerate(steps) for peer, pieces in step.receive.items()}
        assert sent.keys() == received.keys() and all(a != b for a, b in sent)
        assert sum(len(step.send) for step in steps) == len(sent) == sum(len(step.receive) for step in steps)
        for rank, step in enumerate(steps):
            for source, destination in step.local:
                assert source.box == destination.box
                deliver(rank, destination, taken(rank, source))
        for (sender, receiver), parts in sent.items():
            for there, here in zip(parts, received[sender, receiver], strict=True):
                assert there.box == here.box
                deliver(receiver, here, taken(sender, there))
        for rank, step in enumerate(steps):
            complete[rank].extend(step.complete)
            for name in step.complete:
                covered = sum(piece.elements for piece in destinations[rank].by_param[name])
                assert writes[rank][name].sum() == covered
    assert [sorted(names) for names in complete] == [sorted(shard.params) for shard in destinations]
    return params, writes


def arrays(shard, tensors):
    """The parameters of a shard as arrays."""
    return {name: values.numpy() for name, values in filled(shard, tensors).items()}


def elements(params):
    """The set of elements of the model, by their numbers (see `numbered`), that parameters hold."""
    return {int(number) for values in params.values() for number in values[values != 0]}


def arrivals(plan, destination, near):
    """The numbers of the elements that a plan receives from ranks for which near(peer) holds."""
    return [
        int(number)
        for step in plan.rounds
        for peer, pieces in step.receive.items()
        if near(peer)
        for piece in pieces
        for number in view(destination[piece.param], piece.at, piece.shape).flat
    ]


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(moves(), st.sampled_from((0, 1, 2, 3, 4)), st.sampled_from((3, 20, 100, 1 << 24)))
def test_each_element_that_a_rank_lacks_arrives_once_from_as_near_as_it_is_held_and_nothing_else_travels(
    case, ranks_per_node, bucket
):
    shape, train, engines = case
    ranks = range(train.world)
    sources = [megatron_shard(shape, train, rank) for rank in ranks]
    destinations = [vllm_shard(shape, engines, rank) for rank in ranks]
    schedule = Schedule(sources, destinations, ranks_per_node, bucket)
    plans = [schedule.plan(rank) for rank in ranks]
    tensors = numbered(shape, torch.float64)
    held = [arrays(shard, tensors) for shard in sources]
    expected = [arrays(shard, tensors) for shard in destinations]
    params, writes = simulate(plans, held, destinations)
    holds = [elements(params) for params in held]
    figures, tensors_sent = refresh_stats(schedule)
    for rank in ranks:
        for name, values in expected[rank].items():
            assert np.array_equal(params[rank][name], values)
            assert np.array_equal(writes[rank][name], values != 0)
        node = [peer for peer in ranks if ranks_per_node == 0 or peer // ranks_per_node == rank // ranks_per_node]
        on_node = set().union(*(holds[peer] for peer in node))
        lacking = elements(expected[rank]) - holds[rank]
        near = arrivals(plans[rank], expected[rank], lambda peer, node=node: peer in node)
        far = arrivals(plans[rank], expected[rank], lambda peer, node=node: peer not in node)
        assert sorted(near) == sorted(lacking & on_node)
        assert sorted(far) == sorted(lacking - on_node)
        for step in plans[rank].rounds:
            for messages in (step.receive, step.send):
                assert sum(piece.elements for pieces in messages.values() for piece in pieces) <= bucket
        one = figures[rank]
        assert (one.copied, one.received, one.sent) == (
            *(copied_elements(plans[rank]), received_elements(plans[rank]), sent_elements(plans[rank])),
        )
        assert (one.received_near, one.received_far) == (len(near), len(far))
        assert one.sent_near == sum(figures[peer].received_from[rank] for peer in node)
    assert tensors_sent.total() == sum(one.sent for one in figures)


@settings(max_examples=15, deadline=None)
@given(models_and_layouts(most_ranks=8), st.sampled_from((5, 1 << 24)))
def test_the_same_mechanism_gathers_a_model_and_turns_one_training_layout_into_another(case, bucket):
    shape, sizes, _ = case
    train = TrainLayout(*sizes)
    tensors = numbered(shape)
    sources = [megatron_shard(shape, train, rank) for rank in range(train.world)]
    held = [arrays(shard, tensors) for shard in sources]
    other = TrainLayout(sizes[0], 1, sizes[1] * sizes[2])
    for destinations in (
        [hf_shard(shape)] + [NOTHING] * (train.world - 1),
        [megatron_shard(shape, other, rank) for rank in range(train.world)],
    ):
        schedule = Schedule(sources, destinations, 0, bucket)
        plans = [schedule.plan(rank) for rank in range(train.world)]
        params, _ = simulate(plans, held, destinations)
        for shard, values in zip(destinations, params, strict=True):
            expected = arrays(shard, tensors)
            assert all(np.array_equal(values[name], expected[name]) for name in expected)


def test_sources_that_overlap_without_being_equal_are_each_used_for_what_they_hold():
    low = Shard({"p": (4, 2)}, (Piece("a", (0, 0), (4, 2), "p", (0, 0)),))
    high = Shard({"p": (4, 2)}, (Piece("a", (2, 0), (4, 2), "p", (0, 0)),))
    want = Shard({"q": (6, 2)}, (Piece("a", (0, 0), (6, 2), "q", (0, 0)),))
    tensors = {"a": torch.arange(1.0, 13).reshape(6, 2)}
    plans = [Schedule([low, high], [want, want]).plan(rank) for rank in range(2)]
    params, _ = simulate(plans, [arrays(low, tensors), arrays(high, tensors)], [want, want])
    assert all(np.array_equal(values["q"], tensors["a"]) for values in params)
    assert [received_elements(plan) for plan in plans] == [4, 4]


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
    plans = [Schedule(sources, [stacked, stacked]).plan(rank) for rank in range(2)]
    params, _ = simulate(plans, [arrays(shard, tensors) for shard in sources], [stacked, stacked])
    assert all(np.array_equal(values["w13"], torch.stack(list(tensors.values()))) for values in params)


def test_a_rank_takes_from_its_own_node_when_that_holds_the_part():
    shape, train = model_shape(layers=4), TrainLayout(2, 1, 4)
    sources = [megatron_shard(shape, train, rank) for rank in range(8)]
    destinations = [vllm_shard(shape, RolloutLayout(1, 8), rank) for rank in range(8)]
    for rank in range(8):
        peers = {peer for step in Schedule(sources, destinations, 2).plan(rank).rounds for peer in step.receive}
        assert peers == {rank ^ 1}


def test_who_alone_holds_what_many_need_sends_no_more_than_a_bucket_in_a_round():
    held = Shard({"a": (8, 2)}, (whole("a", (8, 2), "a"),))
    plan = Schedule([held, *[NOTHING] * 3], [NOTHING, *[held] * 3], bucket_elements=4).plan(0)
    sent = [sum(piece.elements for pieces in step.send.values() for piece in pieces) for step in plan.rounds]
    assert max(sent) <= 4 and sum(sent) == 48


def test_senders_share_the_work():
    """Sixteen ranks, of which every second holds what the others need."""
    full = hf_shard(model_shape())
    sources = [full if rank % 2 == 0 else NOTHING for rank in range(16)]
    schedule = Schedule(sources, [full] * 16)
    sent = [sent_elements(schedule.plan(rank)) for rank in range(0, 16, 2)]
    assert max(sent) <= 1.05 * full.elements


def test_a_node_that_has_to_send_more_of_one_thing_is_spared_with_another():
    """Ranks 0 and 1 are a node, 2 and 3 another; a is held by rank 0 alone, b by 1 and 2, and 4 and 5 need both."""
    a, b = (Shard({name: (8, 2)}, (whole(name, (8, 2), name),)) for name in "ab")
    both = Shard({**a.params, **b.params}, a.pieces + b.pieces)
    schedule = Schedule([a, b, b, *[NOTHING] * 3], [*[NOTHING] * 4, both, both], ranks_per_node=2, bucket_elements=4)
    sent = [one.sent for one in refresh_stats(schedule)[0]]
    assert sent[0] == 32 and sent[1] + sent[2] == 32 and sent[2] > sent[1] > 0


def test_ranks_stay_with_few_others_where_that_costs_no_balance():
    shape, train = model_shape(layers=8, hidden=16), TrainLayout(2, 2, 8)
    sources = [megatron_shard(shape, train, rank) for rank in range(32)]
    destinations = [vllm_shard(shape, RolloutLayout(2, 32), rank) for rank in range(32)]
    ranks, _ = refresh_stats(Schedule(sources, destinations, 4, 512))
    assert max(len(one.received_from) for one in ranks) <= 4
    assert max(one.sent for one in ranks) <= 1.2 * sum(one.sent for one in ranks) / 32


@settings(max_examples=30, deadline=None)
@given(moves(), st.sampled_from((100, 400)))
def test_rounds_are_few(case, bucket):
    """The fullest rank, whether it sends or receives, decides; packing bundles into buckets wastes at most half."""
    shape, train, engines = case
    sources = [megatron_shard(shape, train, rank) for rank in range(train.world)]
    destinations = [vllm_shard(shape, engines, rank) for rank in range(train.world)]
    schedule = Schedule(sources, destinations, 0, bucket)
    ranks, _ = refresh_stats(schedule)
    busiest = max(max(one.sent, one.received, one.copied) for one in ranks)
    assert schedule.rounds <= 2 * busiest / bucket + 4


def test_a_parameter_is_finished_before_many_others_are_begun():
    """Eight ranks need sixteen parameters, half of each from rank 0, which is slow to serve all, half from others."""
    halves = [[whole(f"{x}{n}", (4,), f"{x}{n}") for n in range(16)] for x in "ab"]
    groups = [halves[0], *(halves[1][k::4] for k in range(4))]
    sources = [Shard({piece.param: (4,) for piece in group}, tuple(group)) for group in groups]
    pieces = [Piece(f"{x}{n}", (0,), (4,), f"p{n}", (4 * (x == "b"),)) for n in range(16) for x in "ab"]
    wanted = Shard({f"p{n}": (8,) for n in range(16)}, tuple(pieces))
    schedule = Schedule(sources + [NOTHING] * 8, [NOTHING] * 5 + [wanted] * 8, 0, 4)
    for rank in range(5, 13):
        begun = set()
        for step in schedule.plan(rank).rounds:
            begun |= {piece.param for pieces in step.receive.values() for piece in pieces}
            assert len(begun) <= 2
            begun -= set(step.complete)


def test_layouts_that_agree_need_no_messages():
    shape = model_shape(vocabulary=64)  # both sides pad it alike
    sources = [megatron_shard(shape, TrainLayout(2, 1, 2), rank) for rank in range(4)]
    destinations = [vllm_shard(shape, RolloutLayout(2, 4), rank) for rank in range(4)]
    schedule = Schedule(sources, destinations, 0, 64)
    assert all(not step.send and not step.receive for rank in range(4) for step in schedule.plan(rank).rounds)
    assert not refresh_stats(schedule)[1]


def test_a_bucket_may_be_given_in_bytes():
    assert bucket_of_bytes(1 << 20, 2) == 1 << 19
    assert bucket_of_bytes(1, 4) == 1


def test_a_part_that_nobody_holds_is_named():
    half = Shard({"p": (2, 2)}, (Piece("a", (0, 0), (2, 2), "p", (0, 0)),))
    want = Shard({"q": (3, 2)}, (Piece("a", (0, 0), (3, 2), "q", (0, 0)),))
    with pytest.raises(ValueError, match=r"no rank holds all of a\[0:3, 0:2\], which q is made of"):
        Schedule([half], [want])
    assert str(Box("a", (0, 1), (2, 2))) == "a[0:2, 1:3]"
