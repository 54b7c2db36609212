"""Whom a report blames, and how it fits on a screen."""

import pytest

from spmd_rl.distributed.status import WAITS
from spmd_rl.health.hang_report import RankState, diagnose, report, table
from spmd_rl.health.heartbeat import Heartbeat
from spmd_rl.health.procfs import GONE

PLACE = {"step": 7, "phase": "reshard_to_infer", "verb": "to_rollout", "doing": "bucket 12 of 31"}


def standing(rank: int, still: float = 312.0, silent=0.0, state=None, neighbours=8, **place) -> RankState:
    fields = PLACE | {"seconds": still, "host": f"node{rank // 8}", "machine": f"node{rank // 8}"} | place
    return RankState(Heartbeat(rank, 9, process=100 + rank, **fields), still, silent, silent > 0, state, neighbours)


def waiting(rank: int, **place) -> RankState:
    return standing(rank, **{"waits": "all_reduce", "stack": ["exchange (move.py:7)"]} | place)


REWARD = {"phase": "rollout", "verb": "rewards", "doing": "reward math_answer, sample 8123, in process 77; 1 samples"}


def test_the_rank_that_waits_for_a_grader_is_blamed_by_rule_and_sample():
    ranks = [waiting(0), waiting(1), waiting(2), standing(3, **REWARD)]
    diagnosis = diagnose(ranks)
    assert diagnosis.ranks == (3,)
    assert "rank 3 waits for a grader: reward math_answer, sample 8123" in diagnosis.reasons[0]
    first, second = table(ranks, diagnosis.ranks)
    assert first.startswith("rank 3 (node0, process 103) in step 7, rollout (rewards): reward math_answer, sample 8123")
    assert first.endswith("for 312 s   <- look here first")
    assert second == (
        "ranks 0-2 wait in step 7, reshard_to_infer (to_rollout): bucket 12 of 31 [all_reduce], for 312 s"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("T", "rank 1 is stopped by a signal (process state T)"),
        ("t", "stopped by a debugger"),
        ("R", "runs (process state R) and lets no other thread of its Python work"),
        ("S", "sleeps (process state S)"),
        ("D", "a disk or a driver does not answer"),
        (GONE, "there is no such process any more"),
        (None, "sends no heartbeat, and others on its node do"),
    ],
)
def test_a_silent_rank_is_blamed_by_the_state_of_its_process(state, words):
    ranks = [waiting(0), standing(1, silent=30.0, state=state), standing(2, **REWARD)]
    diagnosis = diagnose(ranks)
    assert diagnosis.ranks == (1,) and words in diagnosis.reasons[0]
    assert "no heartbeat for 30 s   <- look here first" in table(ranks, diagnosis.ranks)[0]


def test_a_node_of_which_no_rank_lives_is_blamed_as_a_whole():
    ranks = [waiting(rank) for rank in range(16)] + [standing(r, silent=40.0, neighbours=0) for r in range(16, 24)]
    diagnosis = diagnose(ranks)
    assert diagnosis.ranks == tuple(range(16, 24))
    assert "ranks 16-23: no rank on node2 sends a heartbeat: the node or its link is gone" in diagnosis.reasons[0]


def test_a_loop_is_told_from_a_wait_by_its_processor_time():
    loop = {"doing": "micro-batch 3 of 8", "stack": ["spin (rule.py:3)"]}
    assert "an endless loop" in diagnose([waiting(0), standing(1, busy_seconds=300.0, **loop)]).reasons[0]
    assert "a file, a lock" in diagnose([waiting(0), standing(1, busy_seconds=1.0, **loop)]).reasons[0]


def test_a_rank_at_work_is_blamed_while_the_others_wait_for_its_answer():
    ranks = [
        standing(0, doing=WAITS + "the answer of rank 1", waits="recv"),
        standing(1, doing="engine step 900, request 17; 30 of 64 finished", verb="generate", busy_seconds=300.0),
        standing(2, verb="", doing=WAITS + "the next verb", waits="recv"),
    ]
    assert diagnose(ranks).ranks == (1,)


def test_a_rank_that_waits_in_another_exchange_than_most_is_blamed():
    diagnosis = diagnose([waiting(0), waiting(1), waiting(2, stack=["verify (checksum.py:9)"], waits="all_gather")])
    assert diagnosis.ranks == (2,) and "waits in all_gather, verify (checksum.py:9)" in diagnosis.reasons[0]
    assert diagnose([waiting(0), waiting(1, waits="recv")]).ranks == (0, 1), "of two, either may be the wrong one"


def test_nobody_is_blamed_when_all_wait_in_the_same_exchange_but_the_network():
    diagnosis = diagnose([waiting(rank) for rank in range(16)])
    assert diagnosis.ranks == ()
    assert (
        "ranks 0-15 wait in the same exchange (all_reduce)" in diagnosis.reasons[0] and "a link" in diagnosis.reasons[0]
    )
    assert diagnosis.reasons[1] == "hosts: node0: ranks 0-7; node1: ranks 8-15"


def test_a_verb_that_got_lost_between_two_ranks_is_the_network_s_too():
    ranks = [
        standing(0, verb="", doing=WAITS + "the answer of rank 1", waits="recv"),
        standing(1, verb="", doing=WAITS + "the next verb", waits="recv"),
    ]
    assert diagnose(ranks).ranks == () and "between two verbs" in diagnose(ranks).reasons[0]


def test_384_ranks_fit_on_a_screen():
    ranks = [waiting(rank, doing=f"bucket {rank % 31} of 31", still=300.0 + rank % 5) for rank in range(384)]
    ranks[200] = standing(200, **REWARD)
    diagnosis = diagnose(ranks)
    lines = table(ranks, diagnosis.ranks)
    assert diagnosis.ranks == (200,) and lines[0].startswith("rank 200") and len(lines) == 2
    assert lines[1].startswith("ranks 0-199, 201-383 wait in step 7") and "and the like" in lines[1]
    assert "for 300 to 304 s" in lines[1]


def test_many_different_places_end_in_a_pointer_to_the_file():
    ranks = [standing(rank, doing=f"file {chr(97 + rank % 26)}{'x' * (rank // 26)}") for rank in range(384)]
    lines = table(ranks, ())
    assert len(lines) < 40 and lines[-1].endswith("elsewhere, see places.json")


def test_the_report_has_the_stack_of_the_rank_to_look_at_and_what_its_signal_handler_wrote():
    dump = (
        "Thread 0x1 (most recent call first):\n  File a\n\nCurrent thread 0x2 (most recent call first):\n  File re.py\n"
    )
    stopped = standing(1, silent=9.0, state="R", stack=["match (re.py:1)", "main (x.py:2)"])
    text = report("why", [waiting(0), stopped], diagnose([waiting(0), stopped]), {1: dump}, "/dir", "the end")
    assert text.startswith("hang: why\n") and text.endswith("stacks of all threads of all ranks: /dir\nthe end")
    assert "the main thread of rank 1 9 s ago, with its last heartbeat:\n  match (re.py:1)" in text
    assert "Current thread 0x2" in text and "Thread 0x1" not in text
