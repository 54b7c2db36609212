"""Measure what rank 0 costs a step, without devices: `python tools/bench_controller.py [--ranks 64 1024 10000]`.

All other ranks are simulated in this process, with the real messages: processor time of rank 0 alone is counted, on one
core. Beside it what it would send where each rank got the whole plan from rank 0 itself.
"""

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.controller.ranks import HOLDS, Ranks
from spmd_rl.data.answers import ANSWERS, Costs, Exchanged, Generated, Graded, Refreshed
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import SampleReward, Ticket
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.testing.simulated_ranks import SimulatedRanks

TENSOR = 4
"""Ranks of one training replica, and of one engine."""
SAMPLES_PER_PROMPT = 16
BUDGET_TOKENS = 16_384


class Worker:
    """Return what a rank answers to the verbs of a step."""

    def __init__(self, ranks: int, samples: int):
        rng = random.Random(1)
        self.ranks = ranks
        layout = TrainLayout(TENSOR, 1, ranks // TENSOR)
        self.data_ranks = [layout.coords(rank).data for rank in range(ranks)]
        self.tickets: list[list[Ticket]] = [[] for _ in range(ranks)]
        for sample in range(samples):
            prompt = sample // SAMPLES_PER_PROMPT
            owner = prompt % (ranks // TENSOR) * TENSOR
            tokens = rng.randint(20, 8000)
            self.tickets[owner].append(Ticket(sample, prompt, 50 + prompt % 750, tokens, tokens, "stop", owner=owner))

    def do(self, verb: str, arguments: dict[str, Any]) -> Any:
        return self.answer(0, verb, arguments)

    def answer(self, rank: int, verb: str, arguments: dict[str, Any]) -> Any:
        match verb:
            case "to_rollout":
                return Refreshed(1 << 30, 1 << 30)
            case "generate":
                return Generated(self.tickets[rank], 31.25, 31.25, 12_345, 1234)
            case "rewards":
                scored = [SampleReward(t.id, 1.0, "correct", {"math_answer": 1.0}) for t in self.tickets[rank]]
                return Graded(scored, 1.5, 0.25)
            case "exchange":
                return Exchanged(1 << 20, 1 << 18, 1 << 10)
            case "score":
                return {"onload": 0.5, "offload": 0.5}
            case "costs":
                return Costs({"learn": 1 << 33, "generate": 1 << 33}, [dict.fromkeys(HOLDS, 1 << 20)])
            case _:
                return None


@contextmanager
def measured(ranks: SimulatedRanks, what: str, rows: list[tuple[str, float, int, int]]) -> Iterator[None]:
    """Add a row: what, rank 0's seconds, bytes and messages."""
    channel = ranks.channels[0]
    before = time.process_time(), ranks.seconds, channel.bytes_moved, channel.messages_moved
    yield
    seconds = time.process_time() - before[0] - (ranks.seconds - before[1])
    rows.append((what, seconds, channel.bytes_moved - before[2], channel.messages_moved - before[3]))


def bench(count: int, samples: int) -> None:
    """Print the figures of one world."""
    worker = Worker(count, samples)
    simulated = SimulatedRanks(count, worker.answer, protocol=ANSWERS)
    ranks = Ranks(simulated, worker)
    rows: list[tuple[str, float, int, int]] = []
    with measured(simulated, "to_rollout, to_training", rows):
        ranks.to_rollout()
    with measured(simulated, "generate", rows):
        tickets, _ = ranks.generate("train", range(samples // SAMPLES_PER_PROMPT), 0, 16, SamplingParams(1.0, 8192))
    with measured(simulated, "rewards", rows):
        ranks.rewards()
    with measured(simulated, "planner", rows):
        plan = plan_microbatches(tickets, count // TENSOR, 1, BUDGET_TOKENS, True)
    with measured(simulated, "exchange", rows):
        ranks.exchange(plan)
    with measured(simulated, "put", rows):
        ranks.put("advantages", {ticket.id: 0.1 * ticket.id for ticket in tickets})
    with measured(simulated, "score", rows):
        ranks.score("reference")
    with measured(simulated, "costs", rows):
        ranks.costs()
    with measured(simulated, "forget", rows):
        ranks.forget()
    rows.append(("a step", *(sum(row[i] for row in rows) for i in (1, 2, 3))))  # type: ignore[arg-type]
    print(f"{count} ranks, {samples} samples over {count // TENSOR} data-parallel ranks")
    print(f"  {'rank 0':<26}{'seconds':>10}{'bytes':>16}{'messages':>10}")
    for what, seconds, moved, messages in rows:
        print(f"  {what:<26}{seconds:>10.3f}{moved:>16,}{messages:>10}")
    whole = len(msgspec.msgpack.encode([minibatch.microbatches for minibatch in plan.minibatches]))
    print(
        f"  largest message that rank 0 sent {simulated.mail.largest[0]:,} bytes; of any rank "
        f"{max(simulated.mail.largest.values()):,}"
    )
    print(f"  a star and the whole plan: {whole * (count - 1):,} bytes and {2 * (count - 1):,} messages for exchange\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 10_000])
    parser.add_argument("--samples", type=int, default=131_072, help="of a step")
    asked = parser.parse_args()
    for number in asked.ranks:
        bench(number, asked.samples)
