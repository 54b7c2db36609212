"""When a run hangs: a fake clock, and beats of ranks that live by it."""

import pytest

from spmd_rl.config.config import HangConfig
from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import IDLE, WAITS
from spmd_rl.health.hang_detector import HangDetector
from spmd_rl.health.heartbeat import Heartbeat

CONFIG = HangConfig(minimum_seconds=10, factor=4, first_seconds=100, silent_seconds=30)


class Run:
    """Ranks that beat once a second; each can move, stay, or fall silent."""

    def __init__(self, ranks: int = 3, config: HangConfig = CONFIG, least: float = 0.0):
        self.now = 1000.0
        self.clock = HangDetector(config, self.now, least)
        self.places = {rank: {"since": self.now} for rank in range(ranks)}
        self.silent: set[int] = set()
        self.numbers = dict.fromkeys(range(ranks), 0)
        self.last: dict[int, Heartbeat] = {}

    def move(self, *ranks: int, **place: object) -> None:
        for rank in ranks or self.places:
            self.places[rank] = self.places[rank] | place | {"since": self.now}

    def pass_(self, seconds: float, each=lambda: None):
        """So many seconds; the first deadline that passes meanwhile, and after how many."""
        for second in range(1, int(seconds) + 1):
            self.now += 1.0
            each()
            for rank in self.places.keys() - self.silent:
                self.numbers[rank] += 1
                place = self.places[rank]
                self.last[rank] = Heartbeat(rank, self.numbers[rank], seconds=self.now - place["since"], **place)
            self.clock.observe(self.now, self.last.values())
            if found := self.clock.expired(self.now):
                return found, second
        return None


def test_a_phase_that_was_never_seen_to_end_has_the_first_deadline():
    run = Run()
    run.move(phase="rollout")
    found, second = run.pass_(200)
    assert second == 101 and "100 s, the deadline of rollout (hang.first_seconds" in found.reason
    assert found.late_seconds == pytest.approx(1.0) and found.silent == ()


def test_a_deadline_is_learned_from_the_longest_time_without_progress_that_ended():
    run = Run()
    run.move(phase="rollout")
    assert run.pass_(20) is None
    run.move()
    run.pass_(5)
    run.move(phase="update")
    run.pass_(2)
    run.move(phase="rollout")
    run.pass_(1)
    assert run.clock.deadline("rollout")[0] == pytest.approx(80.0, abs=4.0)
    assert run.clock.deadline("update")[0] == pytest.approx(10.0, abs=1.0)  # never under the minimum
    assert run.clock.deadline("export")[0] == 100.0
    _, second = run.pass_(200)
    assert second == pytest.approx(80, abs=4)


def test_a_rank_that_gets_on_keeps_the_run_from_hanging_however_long_the_others_wait():
    run = Run()
    run.move(phase="rollout", verb="generate")
    run.move(0, doing=WAITS + "the answer of rank 2")
    run.move(1, doing=WAITS + "the next verb")
    steps = iter(range(10_000))
    assert run.pass_(2000, lambda: run.move(2, doing=f"engine step {next(steps)}")) is None


def test_a_deadline_that_was_set_counts_from_the_start_for_a_phase_or_a_verb():
    run = Run(config=HangConfig(deadline_seconds={"rollout": 7, "rewards": 3}, minimum_seconds=50), least=60)
    run.move(phase="rollout", verb="generate")
    assert run.pass_(50)[1] == 8
    run.move(phase="rollout", verb="rewards")
    assert run.pass_(50)[1] == 4
    assert run.clock.deadline("export")[0] == 1800


def test_a_grader_may_take_its_time():
    run = Run(least=700)
    assert run.clock.deadline("between phases", "compare_answers")[0] == 700
    assert run.clock.deadline("between phases", "exchange")[0] == 100


def test_ranks_that_only_wait_do_not_bring_their_old_phase_s_deadline():
    run = Run(config=HangConfig(deadline_seconds={"rollout": 500, "update": 20}))
    run.move(0, phase="update", verb="learn")
    run.move(1, 2, phase="rollout", doing=WAITS + "the next verb")
    found, second = run.pass_(600)
    assert second == 21 and "deadline of update" in found.reason


def test_a_rank_whose_beats_stand_still_is_silent_after_its_own_deadline():
    run = Run()
    run.move(phase="rollout")
    run.pass_(3)
    run.silent = {2}
    steps = iter(range(1000))
    found, second = run.pass_(99, lambda: run.move(0, doing=str(next(steps))))
    assert second == 31 and found.silent == (2,)
    assert "no heartbeat from rank 2 for 30 s (hang.silent_seconds)" in found.reason


def test_ranks_that_fall_silent_together_are_told_together():
    run = Run(8)
    run.move(phase="rollout")
    run.pass_(2)
    run.silent = {4, 5}
    run.pass_(2)
    run.silent |= {6, 7}
    found, _ = run.pass_(60)
    assert found.silent == (4, 5, 6, 7) and "ranks 4-7" in found.reason


def test_a_hang_is_told_once_and_again_after_the_run_got_on():
    run = Run(config=HangConfig(deadline_seconds={"start": 5}))
    assert run.pass_(20)[1] == 6
    assert run.pass_(100) is None
    run.move()
    assert run.pass_(20)[1] == 6


def test_nobody_hangs_while_a_person_thinks():
    run = Run(1, HangConfig(deadline_seconds={"start": 5}))
    run.move(doing=IDLE)
    assert run.pass_(500) is None
    run.move(doing="")
    assert run.pass_(20)[1] == 6


def test_a_stop_of_the_clock_itself_is_forgiven():
    """Ctrl-Z and fg, or a laptop that slept: all processes stand still, and nobody hangs."""
    run = Run(config=HangConfig(deadline_seconds={"start": 20}, silent_seconds=20))
    run.pass_(5)
    run.now += 3600
    for place in run.places.values():  # beats leave out what their own process was stopped for
        place["since"] += 3600
    found, second = run.pass_(100)
    assert second == pytest.approx(16, abs=2) and found.late_seconds < 5


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1], "ranks 0-1, 5"), ([2, 4], "ranks 2, 4")]
)
def test_ranks_are_named_shortly(ranks, words):
    assert ranks_named(ranks) == words
