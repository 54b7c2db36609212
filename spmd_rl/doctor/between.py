"""All checks that nodes make together, before a process group exists."""

from collections.abc import Sequence
from dataclasses import asdict

from spmd_rl.doctor import clock_skew as clock
from spmd_rl.doctor import fingerprint, network
from spmd_rl.doctor.finding import Finding, at, from_plain
from spmd_rl.doctor.local import Here, facts
from spmd_rl.doctor.node_rendezvous import NodeRendezvous
from spmd_rl.doctor.reach import reach


def findings_of_all(rendezvous: NodeRendezvous, here: Here, words: Sequence[str], own: list[Finding]) -> list[Finding]:
    """A collective of the nodes. Every node gets the same findings: everybody's own, and what they see together.

    Raises ValueError that names the nodes which did not come.
    """
    rows = rendezvous.gather("findings", [asdict(finding) for finding in own])
    everyone = rendezvous.gather("facts", facts(here, words))
    offsets = rendezvous.clock()
    found: list[Finding] = []
    if rows is not None and everyone is not None and offsets is not None:
        for node, theirs in enumerate(rows):
            found += at(f"node {node}", from_plain(theirs))
        found += fingerprint.compare(everyone)
        found += clock.clock_findings(offsets)
    found = from_plain(rendezvous.share("together", [asdict(finding) for finding in found]))
    try:
        address = network.own_address()
    except ValueError:
        address = "127.0.0.1"  # a finding already; the others shall still hear of it
    return found + reach(rendezvous, address)
