"""Count what a refresh copies and sends, by rank and by tensor, from its schedule: no rank's plan is made."""

from collections import Counter
from dataclasses import dataclass, field

from spmd_rl.weights.transfer.suppliers import Bundle
from spmd_rl.weights.transfer.transfer_schedule import Schedule


@dataclass
class RankStats:
    """Elements that one rank copies, receives and sends in a refresh; `near`: to and from ranks on the same node."""

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


def refresh_stats(schedule: Schedule) -> tuple[list[RankStats], Counter[str]]:
    """Return the figures of each rank, and by Hugging Face tensor the elements that go from one rank to another."""
    ranks = [RankStats() for _ in range(schedule.world)]
    journeys: Counter[Bundle] = Counter()
    for rank, taken in zip(ranks, schedule.incoming, strict=True):
        rounds: Counter[int] = Counter()
        for round, taker, supplier, bundle in taken:
            if supplier == taker:
                rank.copied += bundle.elements
                continue
            rounds[round] += bundle.elements
            rank.received_from[supplier] += bundle.elements
            journeys[bundle] += 1
        rank.fullest_receiving = max(rounds.values(), default=0)
    for rank, given in zip(ranks, schedule.outgoing, strict=True):
        rounds = Counter()
        for round, taker, _, bundle in given:
            rounds[round] += bundle.elements
            rank.sent_to[taker] += bundle.elements
        rank.fullest_sending = max(rounds.values(), default=0)
    for number, rank in enumerate(ranks):
        node = number // schedule.ranks_per_node
        rank.received_near = sum(n for peer, n in rank.received_from.items() if peer // schedule.ranks_per_node == node)
        rank.received_far = rank.received_from.total() - rank.received_near
        rank.sent_near = sum(n for peer, n in rank.sent_to.items() if peer // schedule.ranks_per_node == node)
        rank.sent_far = rank.sent_to.total() - rank.sent_near
    tensors: Counter[str] = Counter()
    for bundle, times in journeys.items():
        for piece in bundle.pieces:
            tensors[piece.tensor] += times * piece.elements
    return ranks, tensors
