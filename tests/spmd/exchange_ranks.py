"""One rank of the exchange test."""

from spmd.ranks import join, report


def main() -> None:
    import torch

    from spmd_rl.distributed.exchange import exchange
    from spmd_rl.platforms import current

    world = join(current("cpu"))
    # rank r sends r + 2 * s numbers to rank s, and nothing where that is 3
    sizes = [[0 if r + 2 * s == 3 else r + 2 * s for s in range(world.size)] for r in range(world.size)]
    outgoing = [torch.full((sizes[world.rank][s],), 10 * world.rank + s, dtype=torch.int32) for s in range(world.size)]
    incoming, sent = exchange(outgoing, world.payload)
    expected = [torch.full((sizes[r][world.rank],), 10 * r + world.rank, dtype=torch.int32) for r in range(world.size)]
    report(
        world.rank,
        {
            "equal": all(torch.equal(a, b) for a, b in zip(incoming, expected, strict=True)),
            "sent_bytes": sent,
            "expected_bytes": 4 * sum(n for s, n in enumerate(sizes[world.rank]) if s != world.rank),
        },
    )
