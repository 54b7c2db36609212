"""Laws of the tree of verbs: who gets what, in which order answers come, what rank 0 sends, and who is named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.answers import ANSWERS
from spmd_rl.distributed.commands import MissingRanks
from spmd_rl.testing.simulated_ranks import SimulatedLink, SimulatedRanks


def told(rank, verb, arguments):
    return [rank, verb, arguments]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_each_rank_gets_its_own_part_and_answers_come_in_the_order_of_ranks(size, fan_out, data):
    ranks = SimulatedRanks(size, told, fan_out)
    assert ranks.all("score", {"model": "policy"}) == [[rank, "score", {"model": "policy"}] for rank in range(size)]
    parts = [{"own": [rank] * (rank % 3)} for rank in range(size)]
    answers = ranks.all("judge", {"share": True}, by_rank=parts)
    assert answers == [[rank, "judge", {"share": True, **parts[rank]}] for rank in range(size)]
    some = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    parts = [{"own": rank} for rank in some]
    told_apart = sorted([rank, "learn", part] for rank, part in zip(some, parts, strict=True))
    if some:
        assert ranks.all("learn", {}, some, parts) == told_apart


def test_groups_are_trees_of_their_own():
    groups = [[rank for rank in range(40) if rank % 2 == odd] for odd in (0, 1)]
    ranks = SimulatedRanks(40, told, 3, groups)
    assert ranks.all("learn", {}, groups[1]) == [[rank, "learn", {}] for rank in groups[1]]
    assert not any(ranks.channels[rank].messages_moved for rank in groups[0] if rank), "the other group heard of it"
    assert sorted(ranks.all("costs", {})) == [[rank, "costs", {}] for rank in range(40)]


@pytest.mark.parametrize("size", [2, 9, 65, 1024])
def test_rank_0_sends_and_receives_as_many_messages_as_it_has_children(size):
    ranks = SimulatedRanks(size, told)
    ranks.all("costs", {})
    assert ranks.channels[0].messages_moved <= 2 * 8
    assert max(channel.messages_moved for channel in ranks.channels) <= 2 * 8 + 2


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 999), min_size=1, max_size=60), st.data())
def test_combined_answers_are_what_all_of_them_say(fan_out, tokens, data):
    def laid(rank, verb, arguments):
        failed = f"rank {rank}" if tokens[rank] > 900 else None
        return {
            "exchange": {"network_bytes": 7 * tokens[rank], "tokens": tokens[rank], "padding_tokens": rank},
            "checkpoint_progress": {"written": tokens[rank] > 9, "failed": failed, "asked": rank == 5},
        }[verb]

    size = len(tokens)
    ranks = SimulatedRanks(size, laid, fan_out, protocol=ANSWERS)
    found = ranks.all("exchange", {})
    assert (found.network_bytes, found.tokens, found.padding_tokens) == (7 * max(tokens), sum(tokens), sum(range(size)))
    assert (found.ranks, found.most_tokens) == (size, max(tokens))
    found = ranks.all("checkpoint_progress", {})
    first = next((f"rank {rank}" for rank, count in enumerate(tokens) if count > 900), None)
    assert (found.written, found.failed, found.asked) == (min(tokens) > 9, first, size > 5)


@pytest.mark.parametrize("verb", [verb for verb, how in ANSWERS.items() if how.type is None])
def test_what_has_no_answer_costs_rank_0_a_few_bytes(verb):
    ranks = SimulatedRanks(200, lambda rank, verb, arguments: None, protocol=ANSWERS)
    assert ranks.all(verb, {}) is None
    assert ranks.bytes_moved < 8 * 100


def test_rank_0_sends_a_plan_once_whatever_the_world():
    for size in (64, 1024):
        ranks = SimulatedRanks(size, lambda rank, verb, arguments: None)
        parts = [{"microbatches": [list(range(rank, rank + 65536 // size))]} for rank in range(size)]
        ranks.all("judge", {}, by_rank=parts)
        assert ranks.channels[0].bytes_moved < 1.2 * 65536 * 3


@pytest.mark.parametrize(("size", "fan_out", "away"), [(3, 8, 1), (5, 1, 3), (200, 4, 1), (200, 4, 77), (200, 4, 199)])
def test_a_rank_that_does_not_arrive_is_named_by_its_parent_to_rank_0(size, fan_out, away):
    ranks = SimulatedRanks(size, told, fan_out, away=[away])
    with pytest.raises(MissingRanks, match=f"^rank {away} did not arrive at verb 'score' within 600 s "):
        ranks.all("score", {})


def test_ranks_that_stay_away_in_several_branches_are_all_named():
    ranks = SimulatedRanks(200, told, 4, away=[60, 140])
    with pytest.raises(MissingRanks, match="^rank 60 did not arrive .*; rank 140 did not arrive"):
        ranks.all("score", {})


@pytest.mark.parametrize(("size", "fan_out", "gone"), [(3, 8, 2), (5, 1, 3), (200, 4, 77)])
def test_a_rank_that_is_gone_before_it_answers_is_named_by_its_parent_to_rank_0(size, fan_out, gone):
    ranks = SimulatedRanks(size, told, fan_out, gone=[gone])
    with pytest.raises(MissingRanks, match=f"^rank {gone} is gone before its answer: "):
        ranks.all("score", {})


class Severed(SimulatedLink):
    """The link of rank 1, whose parent ends once it has sent a verb."""

    def receive(self, rank):
        message = super().receive(rank)
        self.send = self.give_receipt = self.receive = self.broken
        return message

    def broken(self, *_):
        raise RuntimeError("writev [127.0.0.1]:9: Broken pipe")


@pytest.mark.parametrize(
    ("act", "when"),
    [
        (lambda channel: channel.confirm(), "at verb 'score'"),
        (lambda channel: channel.answer(1), "before it took the answer to 'score'"),
        (lambda channel: channel.take(), "before its next verb"),
    ],
)
def test_a_parent_that_is_gone_is_named_whatever_its_child_is_at(act, when):
    ranks = SimulatedRanks(2, told)
    channel = ranks.channels[1]
    channel.link = Severed(1, ranks.mail)
    ranks.post("score", {})
    channel.take()
    with pytest.raises(MissingRanks, match=f"^rank 0 is gone {when}: .*Broken pipe"):
        act(channel)
