"""Check that nodes reach each other's addresses, with short connections, before a library waits for one."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.doctor.finding import Finding
from spmd_rl.doctor.node_rendezvous import NodeRendezvous

CONNECT_SECONDS = 3.0
# With more nodes than this, each tries those at a distance of 1, 2, 4, ...: enough to find one that is cut off.
ALL_PAIRS = 16


def peers(node: int, nodes: int) -> list[int]:
    """Whom a node tries to reach."""
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != node]
    return sorted({(node + (1 << bit)) % nodes for bit in range(nodes.bit_length())} - {node})


@contextmanager
def listening(address: str) -> Iterator[int]:
    """The port on which this address accepts connections meanwhile; 0 where it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
            server.listen(128)
            yield server.getsockname()[1]
        except OSError:
            yield 0


def connects(address: str, port: int, own: str, seconds: float = CONNECT_SECONDS) -> str:
    """Why a connection from `own` cannot be made; empty when it can."""
    if not port:
        return "nothing can listen there"
    try:
        # From the address that would be used: another interface of this machine may lead there, and be of no use.
        with socket.create_connection((address, port), timeout=seconds, source_address=(own, 0)):
            return ""
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        if error.errno == errno.EINVAL:
            return f"no way there from {own}"
        return error.strerror or str(error)


def reach(rendezvous: NodeRendezvous, own: str) -> list[Finding]:
    """A collective of the nodes: who cannot open a connection to whom. Every node gets all findings."""
    with listening(own) as port:
        everyone = rendezvous.exchange("address", [own, port])
        others = {node: everyone[node] for node in peers(rendezvous.node, rendezvous.nodes)}
        mine = {node: why for node, address in others.items() if (why := connects(*address, own=own))}
        tried = rendezvous.gather("reach", [[other, why] for other, why in mine.items()])
        rows = rendezvous.share("reached", None if tried is None else tried)
    return reach_findings([dict(map(tuple, row)) for row in rows], [address for address, _ in everyone])


def reach_findings(failed: list[dict[int, str]], own: list[str]) -> list[Finding]:
    """From each node's failures (other node -> why) and each node's address."""
    nodes = len(own)
    if not any(failed):
        return [Finding("reach", f"{nodes} nodes open connections to each other: {', '.join(own[:4])}", "ok")]
    fix = (
        "ranks must reach each other on all ports: look at firewalls and routes, or export GLOO_SOCKET_IFNAME with an "
        "interface of the network that the nodes share"
    )
    # A node that nobody reaches, or that reaches nobody, is the culprit; the others only meet it.
    counts = [len(failed[node]) + sum(node in others for others in failed) for node in range(nodes)]
    found = []
    for node in sorted(range(nodes), key=lambda node: -counts[node]):
        pairs = [(node, other, why) for other, why in failed[node].items()]
        pairs += [(other, node, others[node]) for other, others in enumerate(failed) if node in others]
        pairs = [pair for pair in pairs if not any(_about(row, pair[0], pair[1]) for row in found)]
        if pairs:
            words = "; ".join(f"{own[a]} -> {own[b]}: {why}" for a, b, why in pairs[:4])
            more = f"; and {len(pairs) - 4} more" if len(pairs) > 4 else ""
            found.append(Finding("reach", f"{words}{more}", "stop", fix, f"node {node}"))
    return found


def _about(row: Finding, *nodes: int) -> bool:
    return row.where in {f"node {node}" for node in nodes}
