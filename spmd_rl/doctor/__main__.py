"""Find what would stop or slow a run: `[torchrun ...] -m spmd_rl.doctor [--json] [--config FILE ...]`."""

import argparse
import os
import sys
from dataclasses import asdict
from typing import Any

from spmd_rl.distributed.environment import local_rank_from_environment, rank_from_environment, size_from_environment
from spmd_rl.doctor.between import findings_of_all
from spmd_rl.doctor.finding import Finding, as_json, from_plain, status, table
from spmd_rl.doctor.links import Link, link_findings, measure, start_group
from spmd_rl.doctor.local import Here, kind_of, local_findings, number, read_config
from spmd_rl.doctor.node_rendezvous import NodeRendezvous
from spmd_rl.platforms import current

USER_ERROR = 2
WAIT_SECONDS = 60.0


def main(arguments: list[str] | None = None) -> None:
    """Print the table on rank 0; the exit status is 1 where something would stop a run, on every rank."""
    options, words = _parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, which is later
    try:
        config = read_config(words)
        rank, world = rank_from_environment(), size_from_environment()
        here = Here(
            kind=kind_of(config),
            ranks=world,
            ranks_here=number("LOCAL_WORLD_SIZE", world),
            nodes=number("GROUP_WORLD_SIZE", 1),
            config=config,
        )
        found = local_findings(here) if local_rank_from_environment() == 0 else []
        if world > 1:
            found = _with_others(here, words, rank, found)
    except ValueError as error:
        if local_rank_from_environment() == 0:
            print(f"\nspmd_rl.doctor cannot go on:\n{error}\n", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
    if rank == 0:
        print(as_json(found) if options.json else table(found), flush=True)
    sys.exit(status(found))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m spmd_rl.doctor",
        usage="[torchrun ...] %(prog)s [--json] [--config FILE] [--section.key value ...]",
        description="Checks this machine; under torchrun, all nodes and the links between ranks. "
        "Given a run's settings, also its run directory, its model and that all nodes have the same.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for a program, instead of the table")
    return parser.parse_known_args(arguments)


def _with_others(here: Here, words: list[str], rank: int, own: list[Finding]) -> list[Finding]:
    """Return all findings, on every rank."""
    from torch.distributed import PrefixStore

    from spmd_rl.distributed.rendezvous import meet

    store = PrefixStore("doctor", meet(WAIT_SECONDS))
    found = own
    if here.nodes > 1 and local_rank_from_environment() == 0:
        nodes = NodeRendezvous(PrefixStore("nodes", store), number("GROUP_RANK", 0), here.nodes, WAIT_SECONDS)
        found = findings_of_all(nodes, here, words, own)
    ranks = NodeRendezvous(PrefixStore("ranks", store), rank, here.ranks, WAIT_SECONDS)
    found = from_plain(ranks.share("found", [asdict(finding) for finding in found]))
    found += _links(here, ranks, store, found)
    ranks.leave()
    return found


def _links(here: Here, ranks: NodeRendezvous, store: Any, found: list[Finding]) -> list[Finding]:
    """Time the links, unless something is known to be in the way: a library would wait for it for a long time."""
    if any(finding.verdict == "stop" and finding.check in ("interface", "reach", "devices") for finding in found):
        return [Finding("links", "not timed, because of what is said above", "skip")]
    import torch.distributed as dist

    platform, local_rank = current(here.kind), local_rank_from_environment()
    platform.set_environment()
    platform.claim(local_rank)
    try:
        start_group(platform, store, ranks.node, here.ranks)
        links = measure(platform.device(local_rank), ranks.node, here.ranks, here.ranks_here, platform.link_probe_bytes)
    except RuntimeError as error:
        links = [Link(ranks.node, ranks.node, 0.0, 0.0, (str(error).splitlines() or ["failed"])[0])]
    everyone = ranks.gather("links", [asdict(link) for link in links])
    rows = [] if everyone is None else [Link(**link) for theirs in everyone for link in theirs]
    shared = ranks.share("link findings", [asdict(finding) for finding in link_findings(rows, here.ranks_here)])
    if dist.is_initialized():
        dist.destroy_process_group()
    return from_plain(shared)


if __name__ == "__main__":
    main()
