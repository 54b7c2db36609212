"""Ranks that do verbs as those of a run do, without a model; one of them gets stuck in the way that it is told."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from spmd_rl.config.config import HangConfig
from spmd_rl.distributed import world as worlds
from spmd_rl.distributed.commands import ControlChannel
from spmd_rl.distributed.status import doing, set_status
from spmd_rl.health.watchdog import Watchdog, reporting_timeouts
from spmd_rl.platforms import current
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.pool import GraderPool


class Stuck:
    """Be stuck, as a rank can be. Each name is a kind that a test asks for."""

    def __init__(self, pool: GraderPool | None) -> None:
        self.pool = pool

    def stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def loop(self) -> None:
        count = 0
        while True:
            count += 1

    def lock(self) -> None:
        """One call of C code that never gives the interpreter's lock back."""
        re.match(r"(a|aa)+$", "a" * 100 + "b")

    def grader(self) -> None:
        assert self.pool is not None
        sample = RewardSample(prompt="p", response="forever", answer="a")
        self.pool.submit(8123, sample)
        self.pool.collect(block=True)


@record
@reporting_timeouts
def main(asked: dict[str, Any]) -> None:
    world = worlds.start(current("cpu"), 600)
    watch = Watchdog(HangConfig(**asked["hang"]), world, Path(asked["directory"]))
    pool = (
        GraderPool({asked["rule"]: 1.0}, timeout_seconds=600) if world.rank == asked["rank"] and asked["rule"] else None
    )
    stuck = getattr(Stuck(pool), asked["kind"], None)
    commands = ControlChannel(world, asked.get("control_timeout_seconds", 600))

    def update(step: int) -> float:
        total = torch.ones(1)
        for microbatch in range(3):
            with doing(f"micro-batch {microbatch + 1} of 3"):
                if step == 2 and microbatch == 1 and world.rank == asked["rank"] and stuck:
                    stuck()
                dist.all_reduce(total)
        if step == 2 and asked["kind"] == "apart" and world.rank == asked["rank"]:
            Stuck(None).loop()
        return float(total)

    def do(verb: str, arguments: dict[str, Any]) -> Any:
        set_status(verb=verb)
        answer = update(**arguments)
        set_status(verb="")
        return answer

    if world.rank:
        while True:
            verb, arguments = commands.receive()
            commands.answer(do(verb, arguments))
            if asked["kind"] == "late" and arguments["step"] == 2:
                time.sleep(3600)
    for step in range(1, asked["steps"] + 1):
        set_status(step=step, phase="update")
        pending = commands.post("learn", {"step": step})
        pending.wait()
        pending.answer(do("learn", {"step": step}))
        print(f"step {step}", flush=True)
        set_status(phase="between phases")
        time.sleep(asked.get("pause", 0.0))
    watch.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
