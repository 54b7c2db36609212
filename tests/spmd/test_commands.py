"""Rank 0 knows by name who does not arrive."""

import re
import subprocess

import pytest

from spmd.ranks import ROOT, run_ranks
from spmd_rl.testing.launcher import torchrun

SCRIPT = """
import os, sys, time
from contextlib import suppress
sys.path.insert(0, {root!r})
from spmd_rl.distributed import world as worlds
from spmd_rl.distributed.commands import ControlChannel, MissingRanks
from spmd_rl.platforms import current

late, ends, fan_out = map(int, sys.argv[1:])
world = worlds.start(current("cpu"), 60)
commands = ControlChannel(world, 2.0, fan_out)
others = range(1, world.size)
if world.rank == 0:
    pending = commands.post("generate", {{"rows": [1, 2]}}, by_rank=[{{"own": rank}} for rank in range(world.size)])
    pending.wait()
    assert pending.own_arguments == {{"rows": [1, 2], "own": 0}}
    answers = pending.answer("mine")
    assert answers == ["mine", *(["generate", {{"rows": [1, 2], "own": rank}}, rank] for rank in others)], answers
    if world.size > 3:
        some = commands.post("rewards", {{}}, ranks=[3, 1], by_rank=[{{"own": "c"}}, {{"own": "a"}}])
        assert some.own_arguments is None
        assert some.answer() == [["rewards", {{"own": "a"}}, 1], ["rewards", {{"own": "c"}}, 3]]
    try:
        commands.post("score", {{}}).wait()
        commands.post("score", {{}}).wait()
    except MissingRanks as error:
        print("REFUSED", error, flush=True)
        os._exit(0)
else:
    # Who gives up stays until it is ended: torchrun would end rank 0 with it, before rank 0 has said anything.
    with suppress(MissingRanks):
        while True:
            verb, given = commands.receive()
            commands.answer([verb, given, world.rank])
            if world.rank == late and verb == ("rewards" if world.size > 3 and late in (1, 3) else "generate"):
                if ends:
                    os._exit(0)
                break
    time.sleep(600)
os._exit(0)
"""


def refused(directory, count, late, ends, fan_out) -> str:
    """Return what rank 0 says where rank `late` of `count` stays away from the second verb of all, or ends."""
    script = directory / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    command = torchrun(count, str(script), *map(str, (late, int(ends), fan_out)))
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout:
            said.append(line)
            if line.startswith("REFUSED"):
                break
        running.terminate()
    assert said and said[-1].startswith("REFUSED"), "".join(said)[-4000:]
    return said[-1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("count", "late", "fan_out"), [(3, 1, 8), pytest.param(5, 3, 1, marks=SLOW), pytest.param(5, 4, 2, marks=SLOW)]
)
def test_a_rank_that_never_arrives_is_named_with_the_verb(tmp_path, count, late, fan_out):
    line = refused(tmp_path, count, late, False, fan_out)
    assert f"REFUSED rank {late} did not arrive at verb 'score' within 2 s" in line
    assert "control_timeout_seconds" in line


@pytest.mark.parametrize("fan_out", [pytest.param(8, marks=SLOW), 1])
def test_a_rank_that_is_gone_is_named_by_rank_0(tmp_path, fan_out):
    line = refused(tmp_path, 4, 3, True, fan_out)
    assert re.match("REFUSED rank 3 (is gone|did not arrive)", line), line


@pytest.fixture(scope="module")
def exchanged():
    return run_ranks("spmd.exchange_ranks", 4, {})


def test_all_ranks_know_of_the_most_restarts_that_torchrun_has_counted_on_a_node(exchanged):
    assert [report["restarts"] for report in exchanged] == [2] * 4


def test_process_groups_that_have_ended_leave_no_threads(exchanged):
    for report in exchanged:
        without, within, after = report["threads"]
        assert without == after and within <= without + 2 * 20, "two for each group, and one device for all"


def test_samples_reach_every_rank_that_trains_on_them_unchanged(exchanged):
    for report in exchanged:
        assert report == report | {
            "equal": True,
            "samples": True,
            "travelled": True,
            "sent_bytes": report["expected_bytes"],
            "expected_bytes": report["expected_bytes"],
        }
