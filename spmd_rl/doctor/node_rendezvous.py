"""Exchange small facts between nodes before any process group exists, over a TCPStore, as JSON."""

import json
import socket
import time
from datetime import timedelta
from typing import Any

from spmd_rl.doctor.clock_skew import offset

EXCHANGES = 5


class NodeRendezvous:
    """One node's end of a rendezvous: node 0 hears everybody and answers everybody.

    `store`: a torch.distributed store that all nodes are connected to.
    Every method raises ValueError that names the nodes that did not come within `timeout_seconds`.
    """

    def __init__(self, store: Any, node: int, nodes: int, timeout_seconds: float):
        self.node, self.nodes, self.timeout_seconds = node, nodes, timeout_seconds
        self._store = store

    def gather(self, topic: str, facts: Any) -> list[Any] | None:
        """Return the facts of all nodes, in their order, on node 0; None on the others."""
        self._store.set(f"{topic}/{self.node}", json.dumps(facts))
        if self.node:
            return None
        deadline = time.monotonic() + self.timeout_seconds
        found, missing = [], []
        for node in range(self.nodes):
            try:
                found.append(self._get(f"{topic}/{node}", deadline))
            except TimeoutError:
                missing.append(node)
        if missing:
            names = ("node " if len(missing) == 1 else "nodes ") + ", ".join(map(str, missing))
            raise ValueError(
                f"{names} did not come within {self.timeout_seconds:g} s (at: {topic}). Is the command running there, "
                f"with its own NODE_RANK, the same NNODES = {self.nodes} and this MASTER_ADDR and port?"
            )
        return found

    def share(self, topic: str, facts: Any = None) -> Any:
        """Give every node what node 0 passes."""
        if self.node == 0:
            self._store.set(f"{topic}/all", json.dumps(facts))
            return facts
        try:
            # Node 0 may wait its whole time for somebody else first.
            return self._get(f"{topic}/all", time.monotonic() + 2 * self.timeout_seconds)
        except TimeoutError as error:
            raise ValueError(
                f"node 0 said nothing more within {2 * self.timeout_seconds:g} s (at: {topic}); see its output"
            ) from error

    def exchange(self, topic: str, facts: Any) -> list[Any]:
        """Return the facts of all nodes, on every node."""
        return self.share(topic, self.gather(topic, facts))

    def clock(self) -> list[tuple[float, float]] | None:
        """Return, on node 0, each other node's (seconds its clock is ahead, how wrong that may be); None elsewhere."""
        stamps = []
        for node in range(1, self.nodes):
            for turn in range(EXCHANGES) if self.node in (0, node) else ():
                key = f"clock/{node}/{turn}"
                deadline = time.monotonic() + self.timeout_seconds
                try:
                    if self.node == 0:
                        self._get(f"{key}/asked", deadline)
                        self._store.set(f"{key}/time", json.dumps(time.time()))
                    else:
                        asked = time.time()
                        self._store.set(f"{key}/asked", "1")
                        other = self._get(f"{key}/time", deadline)
                        stamps.append((asked, other, time.time()))
                except TimeoutError as error:
                    raise ValueError(f"node {node} and node 0 lost each other while comparing clocks") from error
        everyone = self.gather("clock", offset(stamps) if stamps else None)
        return None if everyone is None else [tuple(found) for found in everyone[1:]]

    def leave(self) -> None:
        """Wait on node 0, which holds the store, until the others have left."""
        self.gather("leave", None)

    def _get(self, key: str, deadline: float) -> Any:
        from torch.distributed import DistError

        left = max(deadline - time.monotonic(), 0.01)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except (DistError, RuntimeError) as error:
            raise TimeoutError(key) from error
        return json.loads(self._store.get(key))


def join(host: str, port: int, node: int, nodes: int, timeout_seconds: float) -> NodeRendezvous:
    """Meet the other nodes at node 0's address.

    Raises ValueError where the port is taken (node 0), or nobody answers there in time (the others).
    """
    from torch.distributed import DistError, TCPStore

    try:
        # torch would listen on every interface.
        listener = {"master_listen_fd": _listener(host, port, nodes)} if node == 0 else {}
        store = TCPStore(
            host,
            port,
            is_master=node == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            **listener,
        )
    except (DistError, RuntimeError, OSError) as error:
        if node == 0:
            raise ValueError(f"port {port}: node 0 cannot listen there ({_first_line(error)})") from error
        raise ValueError(
            f"node {node} found nobody at MASTER_ADDR = {host}, port {port}, within {timeout_seconds:g} s: is the "
            "command running on node 0, is that node 0's address on a network that both share, and does no firewall "
            "close the port?"
        ) from error
    return NodeRendezvous(store, node, nodes, timeout_seconds)


def _listener(host: str, port: int, nodes: int) -> int:
    """Return a descriptor that listens at this address of this machine, and at no other.

    Raises OSError where others can't reach what this machine takes for that address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if nodes > 1 and address[0].startswith("127.") and host not in (address[0], "localhost"):
        raise OSError(
            f"MASTER_ADDR = {host} is {address[0]} on this machine, where no other node gets: give an address of the "
            "network that they share, or fix /etc/hosts"
        )
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        return listener.detach()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
