"""How much a move copies and sends: figures for each rank and for each tensor, without any plan being made."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_rl.weights.transfer.rounds import Schedule


@dataclass
class RankFlow:
    """Elements that one rank copies, receives and sends in a move; `near`: to and from ranks on the same node."""

    copied: int = 0
    received_near: int = 0
    received_far: int = 0
    sent_near: int = 0
    sent_far: int = 0
    fullest_receiving: int = 0
    """Elements that it receives in the round in which it receives most."""
    fullest_sending: int = 0
    received_from: Counter[int] = field(default_factory=Counter)
    """By the other rank."""
    sent_to: Counter[int] = field(default_factory=Counter)

    @property
    def received(self) -> int:
        """Elements from other ranks."""
        return self.received_near + self.received_far

    @property
    def sent(self) -> int:
        """Elements for other ranks."""
        return self.sent_near + self.sent_far


@dataclass(frozen=True)
class Flow:
    """A move in figures."""

    ranks: Sequence[RankFlow]
    tensors: Counter[str]
    """Elements of each Hugging Face tensor that go from one rank to another, over all ranks."""


def flow(schedule: Schedule) -> Flow:
    """The figures of a schedule."""
    ranks = [RankFlow() for _ in range(schedule.world)]
    journeys: Counter = Counter()
    for rank, taken in zip(ranks, schedule.incoming, strict=True):
        rounds: Counter[int] = Counter()
        for taker, supplier, round, bundle in taken:
            if supplier == taker:
                rank.copied += bundle.elements
                continue
            rounds[round] += bundle.elements
            rank.received_from[supplier] += bundle.elements
            journeys[bundle] += 1
        rank.fullest_receiving = max(rounds.values(), default=0)
    for rank, given in zip(ranks, schedule.outgoing, strict=True):
        rounds = Counter()
        for taker, _, round, bundle in given:
            rounds[round] += bundle.elements
            rank.sent_to[taker] += bundle.elements
        rank.fullest_sending = max(rounds.values(), default=0)
    for number, rank in enumerate(ranks):
        node = schedule.node(number)
        rank.received_near = sum(n for peer, n in rank.received_from.items() if schedule.node(peer) == node)
        rank.received_far = rank.received_from.total() - rank.received_near
        rank.sent_near = sum(n for peer, n in rank.sent_to.items() if schedule.node(peer) == node)
        rank.sent_far = rank.sent_to.total() - rank.sent_near
    tensors: Counter[str] = Counter()
    for bundle, times in journeys.items():
        for part in bundle.parts:
            tensors[part.box.tensor] += times * part.box.elements
    return Flow(ranks, tensors)
