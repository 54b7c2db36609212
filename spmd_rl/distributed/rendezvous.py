"""Meet the ranks of one attempt in a part of the launcher's key-value store that no other attempt uses.

torchrun keeps one store while it restarts the ranks, with all that they had written. Process groups would read there
the addresses of ranks that are gone, so the ranks first agree on a word of their own.
"""

import json
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from spmd_rl.distributed.rank_names import ranks_named

_PAUSE_SECONDS = 0.02


class NobodyThere(ValueError):
    """Ranks that did not come."""


def meet(timeout_seconds: float) -> dist.Store:
    """The store of this attempt. A collective act of all ranks that the environment speaks of (RANK, WORLD_SIZE, ...).

    Raises NobodyThere with the ranks that did not come in time; dist.DistNetworkError when there is no store.
    """
    if os.environ["WORLD_SIZE"] == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        return dist.HashStore()  # nobody else is to come, so nothing has to listen
    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))
    return dist.PrefixStore(f"spmd_rl/{agree(store, rank, size, timeout_seconds)}", store)


def of_all_attempts(store: dist.Store) -> dist.Store:
    """The launcher's store that this attempt's is a part of: what is written there outlives restarts of the ranks."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def agree(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """One word for all ranks, whatever earlier ranks have left in the store. A collective act."""
    deadline = time.monotonic() + timeout_seconds
    mine = secrets.token_hex(8)
    store.set(f"spmd_rl/here/{rank}", mine)
    if rank == 0:
        return _call(store, mine, size, deadline, timeout_seconds)
    while True:
        # A list with my own word in it was written by a rank 0 that has seen me: it is of this attempt.
        seen = json.loads(store.get("spmd_rl/seen")) if store.check(["spmd_rl/seen"]) else []
        if len(seen) == size and seen[rank] == mine:
            store.set(f"spmd_rl/{seen[0]}/{rank}", mine)
            return seen[0]
        if time.monotonic() > deadline:
            raise NobodyThere(f"rank 0 did not come within {timeout_seconds:g} s: look at its node")
        time.sleep(_PAUSE_SECONDS)


def _call(store: dist.Store, word: str, size: int, deadline: float, timeout_seconds: float) -> str:
    """Rank 0: write down who is here until all have found themselves in the list."""
    missing, said = set(range(1, size)), None
    while missing:
        seen = [_read(store, f"spmd_rl/here/{rank}") for rank in range(size)]
        if seen != said:
            store.set("spmd_rl/seen", json.dumps(seen))
            said = seen
        missing = {rank for rank in missing if _read(store, f"spmd_rl/{word}/{rank}") != seen[rank] or not seen[rank]}
        if missing and time.monotonic() > deadline:
            raise NobodyThere(f"{ranks_named(missing)} did not come within {timeout_seconds:g} s: look at its node")
        time.sleep(_PAUSE_SECONDS if missing else 0)
    return word


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
