"""Which of a step's samples are kept, and by whom."""

from pathlib import Path

import pytest

from spmd_rl.controller.session import log_samples
from spmd_rl.data.tickets import Ticket

TICKETS = [Ticket(i, i // 4, 5, 5, 5, "stop") for i in range(16)]


class Heard:
    """Stands where ranks and log do, and remembers what it is told."""

    run_dir = Path("runs/x")

    def __init__(self):
        self.said = []

    def conversations(self, ids, step):
        self.said.append(("gather", ids, step))
        return ids

    def write_conversations(self, directory, step):
        self.said.append(("write", directory, step))

    def samples(self, step, lines):
        self.said.append(("log", step, lines))


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, []),
        (4, [("gather", [0, 4, 8, 12], 3), ("log", 3, [0, 4, 8, 12])]),
        (100, [("gather", list(range(16)), 3), ("log", 3, list(range(16)))]),
        (-1, [("write", "runs/x/samples", 3)]),
    ],
)
def test_a_few_samples_spread_over_the_prompts_come_to_rank_0_and_all_of_them_never_do(count, said):
    heard = Heard()
    log_samples(heard, heard, TICKETS, 3, count)
    assert heard.said == said
