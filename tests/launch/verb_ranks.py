"""A rank that does what every rank does between two steps: an all-reduce, then verbs, until somebody is missing."""

import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from spmd_rl.distributed import world as worlds
from spmd_rl.distributed.commands import ControlChannel
from spmd_rl.distributed.gather import gather
from spmd_rl.platforms import current


@record
def main(go: Path) -> None:
    world = worlds.start(current("cpu"), 60)
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total)
    control = {"group": world.control}
    reads = current().peer_memory(world.rank, partial(gather, **control), partial(dist.barrier, **control)).any
    print(
        f"sum {total.item():g} of {world.size} ranks, {world.ranks_per_node} a node, reads peers: {reads}", flush=True
    )
    commands = ControlChannel(world, 4.0)
    if world.rank:
        while True:
            commands.receive()
            commands.answer(world.rank)
    print("answers", commands.post("beat", {}).answer(0), flush=True)
    while not go.exists():
        time.sleep(0.05)
    commands.post("next", {}).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
