"""Which ranks are at an address: gloo names a peer that is gone by its address only."""

import os
import re
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from spmd_rl.distributed.gather import gather

_ranks_at: dict[str, list[int]] = {}


def learn(group: dist.ProcessGroup) -> None:
    """A collective: find out which ranks are at which address."""
    _ranks_at.clear()
    for rank, address in enumerate(gather(_own_address(), group)):
        _ranks_at.setdefault(address, []).append(rank)


def _own_address() -> str:
    """Of this node, on the way to rank 0's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # no packet is sent
            return probe.getsockname()[0]
    except OSError:
        return ""


def who(message: str) -> str:
    """The ranks at the first address that a message names; empty where it names none, or all ranks are on one node."""
    found = re.search(r"\[(\d+\.\d+\.\d+\.\d+)\]:\d+", message)
    ranks = _ranks_at.get(found[1], []) if found else []
    if found is None or not ranks or len(_ranks_at) < 2:
        return ""
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"spmd_rl: {found[1]} is the node of {names}: look there first"


def naming_peers(act: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of a collective say which ranks it is about."""

    @wraps(act)
    def acting(*arguments: Any) -> Any:
        try:
            return act(*arguments)
        except RuntimeError as error:
            if note := who(str(error)):
                error.add_note(note)
            raise

    return acting
