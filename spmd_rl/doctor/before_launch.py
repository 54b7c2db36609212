"""One process a node, before torchrun: `python -m spmd_rl.doctor.before_launch --help`; launch/torchrun.sh calls it.

Messages go to standard error. Standard output gets one line: the interface and the address of this node that lead to
the others.
"""

import argparse
import os
import sys

from spmd_rl.distributed.terminal_lines import end_with_reader
from spmd_rl.doctor import network
from spmd_rl.doctor.between import findings_of_all
from spmd_rl.doctor.finding import Finding, status, table
from spmd_rl.doctor.local import Here, kind_of, local_findings, read_config
from spmd_rl.doctor.node_rendezvous import join

USER_ERROR = 2
# Their arguments are a run's settings.
PROGRAMS = ("spmd_rl.grpo", "spmd_rl.ppo", "spmd_rl.evaluate", "spmd_rl.doctor")


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 to go on, 1 where something would stop the run, 2 where the launch itself is wrong."""
    options, words = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        interface, address = _way(options)
        found = _look(options, words) if options.check else []
    except ValueError as error:
        print(f"\nlaunch: {error}\n", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
    off = [finding for finding in found if finding.verdict in ("warn", "stop")]
    if off and (options.node_rank == 0 or status(off)):
        print(table(off), file=sys.stderr, flush=True)
    if status(found):
        print("launch: not started; see above", file=sys.stderr, flush=True)
        sys.exit(1)
    same = "; ".join(f"{row.check} {row.found}" for row in found if row.check in ("same code", "same config"))
    if same and options.node_rank == 0:
        print(f"launch: {options.nnodes} nodes are ready: {same}", file=sys.stderr, flush=True)
    print(interface, address)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m spmd_rl.doctor.before_launch",
        usage="%(prog)s [options] -- -m MODULE [arguments of the program]",
        description="All nodes meet, compare source, settings, versions and clocks, and try each other's addresses.",
        allow_abbrev=False,
    )
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True, help="torchrun's port")
    parser.add_argument("--meet-port", type=int, required=True, help="the port for this meeting")
    parser.add_argument("--check", type=int, choices=(0, 1), default=1, help="0: only find the interface")
    parser.add_argument("--wait-seconds", type=float, default=300.0, help="for the other nodes")
    options, words = parser.parse_known_args(arguments)
    return options, words[1:] if words[:1] == ["--"] else words


def _way(options: argparse.Namespace) -> tuple[str, str]:
    """(interface, address); raises ValueError for numbers and addresses that cannot work."""
    if options.nnodes < 1 or not 0 <= options.node_rank < options.nnodes:
        raise ValueError(
            f"NODE_RANK = {options.node_rank}, NNODES = {options.nnodes}: give each node its own NODE_RANK from 0 to "
            f"{options.nnodes - 1}"
        )
    for name, port in (("MASTER_PORT", options.master_port), ("MEET_PORT", options.meet_port)):
        if not 1024 <= port <= 65535:
            raise ValueError(f"{name} = {port}: use a number from 1024 to 65535")
    if options.nnodes == 1:
        return "lo", options.master_addr
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return named.split(",")[0], network.own_address()
    interface, address = network.interface_to(options.master_addr)
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # what the launch will set, and what the checks look at
    return interface, address


def _look(options: argparse.Namespace, words: list[str]) -> list[Finding]:
    config = read_config(_settings(words))
    here = Here(
        kind=kind_of(config),
        ranks=options.nnodes * options.nproc_per_node,
        ranks_here=options.nproc_per_node,
        nodes=options.nnodes,
        config=config,
    )
    found = local_findings(here, measure_disk=False)
    if options.node_rank == 0:
        found.append(network.port_finding("MASTER_PORT", options.master_addr, options.master_port))
    if options.nnodes == 1:
        return found
    if options.node_rank == 0:
        meet = network.port_finding("MEET_PORT", options.master_addr, options.meet_port)
        if meet.verdict == "stop":
            raise ValueError(f"{meet.found}; {meet.fix}")
    rendezvous = join(options.master_addr, options.meet_port, options.node_rank, options.nnodes, options.wait_seconds)
    everything = findings_of_all(rendezvous, here, words, found)
    rendezvous.leave()
    return everything


def _settings(words: list[str]) -> list[str]:
    """The words that are a run's settings: those behind `-m` and one of our programs."""
    for at_word, word in enumerate(words[:-1]):
        if word in ("-m", "--module") and words[at_word + 1] in PROGRAMS:
            return [word for word in words[at_word + 2 :] if word != "--json"]
    return []


if __name__ == "__main__":
    end_with_reader()
    main()
