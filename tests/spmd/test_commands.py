"""Rank 0 knows by name who does not arrive."""

import subprocess
import sys

import pytest

from spmd.ranks import ROOT, run_ranks

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from spmd_rl.distributed import world as worlds
from spmd_rl.distributed.commands import ControlChannel, MissingRanks
from spmd_rl.platforms import current

world = worlds.start(current("cpu"), 60)
commands = ControlChannel(world, 2.0)
if world.rank == 0:
    commands.send("generate", {{"rows": [1, 2]}})
    answers = commands.collect("mine")
    assert answers == ["mine", ["generate", {{"rows": [1, 2]}}, 1], ["generate", {{"rows": [1, 2]}}, 2]], answers
    try:
        commands.send("score", {{}})
    except MissingRanks as error:
        print("REFUSED", error, flush=True)
        os._exit(0)
else:
    verb, given = commands.receive()
    commands.answer([verb, given, world.rank])
    if world.rank == 1:
        time.sleep(30)
    commands.receive()
    time.sleep(30)
os._exit(0)
"""


def test_a_rank_that_never_arrives_is_named_with_the_verb(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "3",
        str(script),
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = next(line for line in running.stdout if line.startswith("REFUSED"))
    finally:
        running.terminate()
        running.wait(30)
    assert "rank 1 did not arrive at verb 'score' within 2 s" in line
    assert "control_timeout_seconds" in line


def test_samples_reach_every_rank_that_trains_on_them_unchanged():
    for report in run_ranks("spmd.exchange_ranks", 3, {}):
        assert report == {
            "equal": True,
            "sent_bytes": report["expected_bytes"],
            "expected_bytes": report["expected_bytes"],
        }


@pytest.mark.parametrize("count", [0, 1, 3])
def test_samples_on_the_wire_come_back_bit_for_bit(count):
    import torch

    from spmd_rl.rollout.requests import Completion
    from spmd_rl.worker.sample_store import from_wire, to_wire

    made = [
        Completion(i, torch.arange(4 + i), torch.arange(7, 9 + i), torch.randn(2 + i) * 1e-3, "stop", 0)
        for i in range(count)
    ]
    back = from_wire(to_wire(made))
    assert [sample.id for sample in back] == list(range(count))
    for sample, source in zip(back, made, strict=True):
        assert torch.equal(sample.prompt, source.prompt)
        assert torch.equal(sample.response, source.response)
        assert torch.equal(sample.rollout_logprobs, source.logprobs)
