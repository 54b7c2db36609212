"""Laws of what rank 0 tells the ranks of a plan, and of what that costs it."""

import random

import pytest

from spmd_rl.controller.planner import plan_microbatches
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.answers import ANSWERS, Exchanged, Generated
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import Ticket
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.testing.simulated_ranks import SimulatedRanks

SAMPLING = SamplingParams(1.0, 64)


class Worker:
    """Rank 0's own, and what the others answer: every third rank makes samples."""

    def __init__(self, size: int, samples: int) -> None:
        self.size, self.samples = size, samples
        layout = TrainLayout(2, 1, size // 2)
        self.data_ranks = [layout.coords(rank).data for rank in range(size)]
        self.made = {sample: sample // 4 % size // 3 * 3 for sample in range(samples)}
        self.told: dict[int, dict] = {}

    def do(self, verb: str, arguments: dict) -> object:
        return self.answer(0, verb, arguments)

    def answer(self, rank: int, verb: str, arguments: dict) -> object:
        self.told[rank] = arguments
        if verb == "put":
            return None
        rng = random.Random(rank)
        mine = [sample for sample, owner in self.made.items() if owner == rank and verb == "generate"]
        if verb == "exchange":
            return Exchanged(1, 1, 0)
        tickets = [Ticket(i, i // 4, 9, n := rng.randint(1, 64), n, "stop", owner=rank) for i in mine]
        return Generated(tickets, 1.0, 1.0, 1, 0)


def exchanged(size: int, samples: int) -> tuple[Worker, int, list]:
    """Have simulated ranks exchange a rollout; returns what they heard, rank 0's bytes, the plan's micro-batches."""
    worker = Worker(size, samples)
    simulated = SimulatedRanks(size, worker.answer, protocol=ANSWERS)
    worker.ranks = ranks = Ranks(simulated, worker)
    tickets, _ = ranks.generate("train", range(samples // 4), 0, 4, SAMPLING)
    plan = plan_microbatches(tickets, size // 2, 2, 200, True)
    before = simulated.bytes_moved
    ranks.exchange(plan)
    return worker, simulated.bytes_moved - before, [minibatch.microbatches for minibatch in plan.minibatches]


def test_a_rank_is_told_where_its_own_samples_go_and_its_own_micro_batches():
    worker, _, minibatches = exchanged(12, 96)
    for rank, told in worker.told.items():
        data = worker.data_ranks[rank]
        assert told["minibatches"] == [microbatches[data] for microbatches in minibatches]
        assert set(told["routes"]) == {sample for sample, owner in worker.made.items() if owner == rank}
    to = {sample: data for told in worker.told.values() for sample, data in told["routes"].items()}
    placed = {
        sample: data
        for microbatches in minibatches
        for data, batches in enumerate(microbatches)
        for batch in batches
        for group in batch
        for sample in group
    }
    assert to == placed and len(to) == 96


def test_a_rank_is_told_the_numbers_of_the_samples_that_it_trains_on():
    worker, _, minibatches = exchanged(12, 96)
    values = {sample: sample / 7 for sample in range(96)}
    worker.ranks.put("advantages", values)
    for rank, told in worker.told.items():
        data = worker.data_ranks[rank]
        mine = {s for batches in minibatches for batch in batches[data] for group in batch for s in group}
        assert told == {"field": "advantages", "values": {sample: values[sample] for sample in mine}}


def test_what_rank_0_moves_for_an_exchange_is_a_plan_and_a_few_bytes_a_rank():
    plan_bytes = 3 * 4096 * 3  # numbers of two to three bytes: a route once, and its part to the two ranks of a replica
    for size in (60, 600):
        _, moved, _ = exchanged(size, 4096)
        assert moved < 1.5 * plan_bytes + 150 * size


def answering(answers: dict) -> Ranks:
    """Return four ranks of which each answers so to a verb."""
    simulated = SimulatedRanks(4, lambda rank, verb, arguments: answers[verb][rank], protocol=ANSWERS)
    worker = Worker(4, 0)
    worker.answer = lambda rank, verb, arguments: answers[verb][rank]
    return Ranks(simulated, worker)


def test_equal_answers_come_in_the_order_in_which_they_were_asked():
    ranks = answering({"compare_answers": [[(1, True)], [], [(0, False), (2, True)], []]})
    assert ranks.compare_answers("eval", [(4, "1", "2"), (4, "1/2", "0.5"), (9, "3", "3")]) == [False, True, True]
    before = ranks.commands.bytes_moved
    assert ranks.compare_answers("eval", []) == [] and ranks.commands.bytes_moved == before, "nobody is asked"


def test_what_each_rank_knows_of_its_own_samples_and_files_comes_together():
    files = [{"common.pt": [9, 0]}, {}, {"a.distcp": [7, 1]}, {}]
    ranks = answering({"sample_kl": [[(3, 0.5)], [], [(0, -0.25)], []], "checkpoint_files": files})
    assert ranks.sample_kl() == {3: 0.5, 0: -0.25}
    assert ranks.checkpoint_files("step_000001") == {"common.pt": [9, 0], "a.distcp": [7, 1]}


def test_nodes_that_cannot_complete_their_part_of_a_checkpoint_are_all_named():
    ranks = answering({"complete_checkpoint": [[], ["rank 1: no room"], ["rank 2: read only"], []]})
    with pytest.raises(OSError, match="^rank 1: no room; rank 2: read only$"):
        ranks.complete_checkpoint("step_000001", {})
    assert ranks.idle
