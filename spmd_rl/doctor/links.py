"""Latency and bandwidth between ranks, over the platform's own backend."""

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from spmd_rl.doctor.finding import Finding

# Up to here every pair is timed, one after another; above, neighbours in the ring and the same place on the next node.
ALL_PAIRS = 8
TURNS = 10
MESSAGES = 4
WAIT_SECONDS = 30.0
# A link this much slower than the middle one of its kind is pointed at.
SLOW = 4.0


@dataclass(frozen=True)
class Link:
    """A measurement of a pair of ranks; with a reason, there is none."""

    a: int
    b: int
    latency_seconds: float
    bytes_per_second: float
    error: str = ""


def rounds(world: int, ranks_per_node: int) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, in rounds in which each rank is in one pair at most."""
    if world <= ALL_PAIRS:
        return [[(a, b)] for a in range(world) for b in range(a + 1, world)]
    ring = {(rank, (rank + 1) % world) for rank in range(world)}
    ring |= {(rank, (rank + ranks_per_node) % world) for rank in range(world) if ranks_per_node < world}
    pairs = sorted({(min(pair), max(pair)) for pair in ring})
    found: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = [one for one in found if all(not set(pair) & set(other) for other in one)]
        if free:
            free[0].append(pair)
        else:
            found.append([pair])
    return found


def measure(device: Any, rank: int, world: int, ranks_per_node: int, message_bytes: int) -> list[Link]:
    """A collective over the default process group: the links that this rank measured (as the first of a pair)."""
    import torch
    import torch.distributed as dist

    found: list[Link] = []
    for pairs in rounds(world, ranks_per_node):
        mine = next((pair for pair in pairs if rank in pair), None)
        try:
            # Nobody else talks while a pair is timed, except the pairs of its round.
            dist.barrier()
            if mine is not None:
                link = _pair(dist, torch, device, rank, *mine, message_bytes)
                found += [link] if link is not None else []
        except RuntimeError as error:
            if mine is not None:
                found.append(Link(*mine, 0.0, 0.0, (str(error).splitlines() or ["failed"])[0]))
            break
    return found


def _pair(dist: Any, torch: Any, device: Any, rank: int, a: int, b: int, message_bytes: int) -> Link | None:
    other = b if rank == a else a
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(message_bytes, dtype=torch.uint8, device=device)

    def there_and_back(tensor: Any, messages: int) -> float:
        started = time.perf_counter()
        for _ in range(messages):
            dist.send(tensor, other) if rank == a else dist.recv(tensor, other)
        dist.recv(small, other) if rank == a else dist.send(small, other)
        int(small[0])  # waits for the device
        return time.perf_counter() - started

    there_and_back(large, 1)  # connections are made with the first message
    latency = statistics.median(there_and_back(small, 1) for _ in range(TURNS)) / 2
    seconds = there_and_back(large, MESSAGES)
    if rank != a:
        return None
    return Link(a, b, latency, MESSAGES * message_bytes / max(seconds - latency, 1e-9))


def start_group(platform: Any, store: Any, rank: int, world: int) -> None:
    """The default process group on the platform's backend, with a short patience."""
    import torch.distributed as dist

    dist.init_process_group(
        platform.backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_SECONDS)
    )


def link_findings(links: list[Link], ranks_per_node: int) -> list[Finding]:
    """One row for the links inside nodes and one for those between them; one more for each that is slow or broken."""
    found = []
    for kind, inside in (("within a node", True), ("between nodes", False)):
        ours = [link for link in links if (link.a // ranks_per_node == link.b // ranks_per_node) == inside]
        broken = {(link.a, link.b): link for link in ours if link.error}
        for link in broken.values():
            fix = "look at the interface and firewall between these ranks' nodes (GLOO_/NCCL_/HCCL_SOCKET_IFNAME)"
            found.append(Finding("links", f"no exchange: {link.error}", "stop", fix, f"ranks {link.a} and {link.b}"))
        good = [link for link in ours if not link.error]
        if not good:
            continue
        latency = statistics.median(link.latency_seconds for link in good)
        rate = statistics.median(link.bytes_per_second for link in good)
        slowest = min(good, key=lambda link: link.bytes_per_second)
        text = (
            f"{len(good)} {kind}: {latency * 1e6:.0f} us, {rate / 1e9:.2f} GB/s (median); "
            f"slowest {slowest.bytes_per_second / 1e9:.2f} GB/s, ranks {slowest.a} and {slowest.b}"
        )
        found.append(Finding("links", text, "ok"))
        for link in good:
            if link.bytes_per_second * SLOW < rate or link.latency_seconds > 10 * latency + 1e-3:
                text = (
                    f"{link.latency_seconds * 1e6:.0f} us, {link.bytes_per_second / 1e9:.2f} GB/s, far from the others"
                )
                fix = "look at this link's cable, switch port and speed; run again when the nodes are idle"
                found.append(Finding("links", text, "warn", fix, f"ranks {link.a} and {link.b}"))
    return found
