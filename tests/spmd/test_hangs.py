"""A run that hangs ends by itself, and says which rank to look at and why: ranks that really hang."""

import contextlib
import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deadlines import slowdown
from spmd_rl.testing.launcher import ROOT, environment, torchrun

RULE = """
def forever(sample):
    while True:
        pass
"""
# Kind of tests/spmd/hang_ranks.py, the rank that gets stuck, and what the report says of it.
KINDS = [
    ("stopped", 1, r"rank 1 is stopped by a signal \(process state T\)"),
    pytest.param("stopped", 0, r"rank 0 is stopped by a signal \(process state T\)", marks=pytest.mark.slow),
    ("loop", 1, r"rank 1 computes and makes no progress: an endless loop"),
    ("lock", 1, r"rank 1 runs \(process state R\) and lets no other thread of its Python work"),
    ("grader", 1, r"rank 1 waits for a grader: reward \S+:forever, sample 8123, in process \d+"),
]
SILENT = ("stopped", "lock")
LATE = ("late", 1)
"""It does not come to the next verb, for which rank 0 waits no longer than run.control_timeout_seconds."""
APART = ("apart", 0)
"""It loops where the others are through with the verb."""
NIGHTLY = [("stopped", 0), APART]
"""Launched for the slow tests only."""


@dataclass
class Hung:
    """A launch that has ended."""

    status: int
    output: str
    directory: Path
    report: str

    @property
    def processes(self) -> dict[int, int]:
        """Rank -> process, as the report has them."""
        return {one["rank"]: one["process"] for one in json.loads((self.directory / "places.json").read_text())}


@pytest.fixture(scope="module")
def hung(request, tmp_path_factory):
    """All kinds at once: what takes long is the start of Python."""
    root = tmp_path_factory.mktemp("hangs")
    (root / "rule.py").write_text(RULE)
    running = {}
    kinds = [("stopped", 1), ("loop", 1), ("lock", 1), ("grader", 1), LATE]
    nightly = any("slow" in item.keywords for item in request.session.items if item.path == request.path)
    for kind, rank in kinds + (NIGHTLY if nightly else []):
        directory = root / f"{kind}{rank}"
        directory.mkdir()
        asked = {
            "kind": kind,
            "rank": rank,
            "steps": 3,
            "rule": f"{root / 'rule.py'}:forever" if kind == "grader" else "",
            "directory": str(directory),
            "control_timeout_seconds": 3 if (kind, rank) == LATE else 600,
            # What is silent is found by its silence, the others by their deadline.
            "hang": {"first_seconds": 300, "minimum_seconds": 300}
            | ({"silent_seconds": 8} if kind in SILENT else {"deadline_seconds": {"update": 8}}),
        }
        (directory / "asked.json").write_text(json.dumps(asked))
        running[kind, rank] = subprocess.Popen(
            torchrun(2, "tests/spmd/hang_ranks.py", directory / "asked.json"),
            cwd=ROOT,
            env=environment(ROOT / "tests", PYTHONWARNINGS="ignore"),
            stdout=open(directory / "output", "w"),  # noqa: SIM115 (the launch outlives this block)
            stderr=subprocess.STDOUT,
        )
    ended = {}
    try:
        for (kind, rank), launcher in running.items():
            directory = root / f"{kind}{rank}"
            while (status := launcher.poll()) is None:
                time.sleep(0.5)
            output = (directory / "output").read_text()
            assert (directory / "hang").is_dir(), output
            [report] = (directory / "hang").glob("*/report.txt")
            ended[kind, rank] = Hung(status, output, report.parent, report.read_text())
    finally:
        for launcher in running.values():
            end_tree(launcher)
    return ended


def end_tree(launcher: subprocess.Popen) -> None:
    """Also ranks that are stopped."""
    try:
        below = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()


@pytest.mark.parametrize(("kind", "rank", "words"), KINDS)
def test_the_report_names_the_deadline_the_rank_its_phase_and_what_is_wrong(hung, kind, rank, words):
    report, output = hung[kind, rank].report, hung[kind, rank].output
    assert report.rstrip() in output, "what is on disk was on the console too"
    blamed = [line for line in report.splitlines() if line.endswith("<- look here first")]
    assert len(blamed) == 1 and blamed[0].lstrip().startswith(f"rank {rank} ("), report
    assert re.search(r"step 2, update \(learn\)", blamed[0]), report
    assert ("sample 8123" if kind == "grader" else "micro-batch 2 of 3") in blamed[0], report
    assert re.search(words, report), report
    assert re.search(rf"rank {1 - rank} .* waits in step 2, update \(learn\): .* \[all_reduce\], for \d+ s", report)
    silent = f"hang: no heartbeat from rank {rank} for 8 s (hang.silent_seconds)"
    stalled = "hang: no rank has made progress for 8 s, the deadline of update (hang.deadline_seconds)"
    assert (silent if kind in SILENT else stalled) in report, report
    print(f"{kind}, rank {rank}:", re.search(r"reported \d+\.\d s after the deadline", report)[0])


@pytest.mark.parametrize(("kind", "rank", "words"), KINDS)
def test_the_launch_fails_and_nothing_of_it_is_left(hung, kind, rank, words):
    run = hung[kind, rank]
    assert run.status != 0
    if kind not in SILENT:  # torchrun tells of each rank that left by itself
        assert re.search(r"exitcode +: 75 ", run.output), run.output[-3000:]
    assert set(run.processes) == {0, 1}
    deadline = time.monotonic() + 20 * slowdown()
    while (left := left_of(run)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def left_of(run: Hung) -> list[str]:
    """Ranks of a run, and graders, which have the process that started them on their command line."""
    found = []
    ranks = {str(process) for process in run.processes.values()}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        ours = any(str(run.directory.parents[1]) in word for word in words)
        grades = "spmd_rl.rewards.grading.grader_process" in words and ranks & set(words)
        if process.info["status"] != psutil.STATUS_ZOMBIE and (ours or grades):
            found.append(" ".join(words))
    return found


def test_a_timeout_of_the_control_group_ends_in_the_same_report(hung):
    run = hung[LATE]
    assert "hang: rank 0: rank 1 did not arrive at verb 'learn' within 3 s" in run.report
    assert re.search(r"rank 1 \(.*\) in step 2, update, for \d+ s   <- look here first", run.report), run.report
    assert "rank 1 waits for something that is no rank: a file, a lock, a process, a sleep" in run.report
    assert "main (" in run.report and run.status != 0


@pytest.mark.slow
def test_rank_0_is_blamed_while_another_waits_for_it_to_take_an_answer(hung):
    report = hung[APART].report
    assert "the deadline of update (hang.deadline_seconds)" in report
    assert re.search(r"rank 0 \(.*\) in step 2, update \(learn\), for \d+ s   <- look here first", report), report
    assert re.search(r"rank 1 \(.*\) in step 2, update: waits for (rank 0 to take its answer|the next verb)", report), (
        report
    )


def test_every_rank_leaves_the_stacks_of_its_threads(hung):
    for (kind, rank), run in hung.items():
        for other in (0, 1):
            text = (run.directory / f"rank_{other:05d}.txt").read_text()
            assert text.startswith(f"rank {other} (")
            if (kind, rank) in (LATE, APART):
                continue
            assert "step 2, update, learn" in text.splitlines()[0], text
            if other != rank:
                assert "all_reduce" in text and "hang_ranks.py" in text
        own = (run.directory / f"rank_{rank:05d}.txt").read_text()
        inside = {
            "late": "in main",
            "apart": "in loop",
            "loop": "in loop",
            "lock": "in lock",
            "grader": "in collect",
            "stopped": "process state T",
        }[kind]
        assert inside in own, own


def test_the_stack_of_a_rank_that_holds_the_interpreter_is_in_the_report(hung):
    assert re.search(
        r"as its own signal handler wrote it:\n  Current thread .*\n(  File .*\n)*  File .* in lock\n",
        hung["lock", 1].report,
    )
