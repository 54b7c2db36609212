"""The ranks of this run and the process groups that the program itself uses."""

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from spmd_rl.distributed import addresses
from spmd_rl.distributed.environment import (
    local_rank_from_environment,
    rank_from_environment,
    restarts_from_environment,
    size_from_environment,
)
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.rendezvous import meet, of_all_attempts
from spmd_rl.platforms.platform import Platform

_BEGUN = "spmd_rl/begun"


@dataclass(frozen=True)
class World:
    """The ranks of this run as one of them knows them."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    control: dist.ProcessGroup
    """Gloo, of its own: verbs and answers travel here, whatever the device is busy with."""
    payload: dist.ProcessGroup
    """Gloo: samples, which live on the host, from rank to rank."""
    store: dist.Store
    """The launcher's key-value store, the part of these ranks: it outlives each of them."""
    started: float = field(default_factory=time.monotonic)
    """time.monotonic() when the ranks had met: the same moment on all of them, to about a second."""

    @property
    def node(self) -> int:
        """Return the number of this rank's node."""
        return self.rank // self.ranks_per_node

    def begun(self) -> bool:
        """Return True where an earlier attempt of this launch has called `begin`: torchrun restarted the ranks."""
        return of_all_attempts(self.store).check([_BEGUN])

    def begin(self) -> None:
        """From now on what is in the run's directory is of this launch."""
        of_all_attempts(self.store).set(_BEGUN, "")

    def restarts(self) -> int:
        """Return how often torchrun has started ranks again where it did so most: each node's counts for itself.

        A collective.
        """
        counts: list[int] = gather(restarts_from_environment(), self.payload)
        return max(counts)


def start(platform: Platform, collective_timeout_seconds: float) -> World:
    """Join the other ranks.

    Without torchrun the process is a world of one, on a free port of its own.
    Raises ValueError when the rendezvous address cannot be bound.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    platform.claim(local_rank_from_environment())
    try:
        store = meet(collective_timeout_seconds)
        dist.init_process_group(
            platform.backend,
            timeout=timedelta(seconds=collective_timeout_seconds),
            store=store,
            rank=rank_from_environment(),
            world_size=size_from_environment(),
        )
    except dist.DistNetworkError as error:
        raise ValueError(
            f"MASTER_ADDR:MASTER_PORT = {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"the ranks could not meet there ({str(error).splitlines()[0]}); "
            "give torchrun another --master_port, or --standalone on one node"
        ) from error
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=collective_timeout_seconds))
    addresses.learn(control)
    # A rank may wait long for the next verb (torchrun ends it when rank 0 dies); commands.py keeps the deadlines.
    control._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(days=30))
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank_from_environment(),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        control=control,
        payload=dist.new_group(backend="gloo", timeout=timedelta(seconds=collective_timeout_seconds)),
        store=store,
    )


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
