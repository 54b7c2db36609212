"""One rank of the exchange test."""

import os

from spmd.ranks import join, report


def main() -> None:
    import torch

    from spmd_rl.distributed.exchange import all_to_all, exchange
    from spmd_rl.distributed.sample import Sample, to_wire
    from spmd_rl.platforms import current

    world = join(current("cpu"))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str((0, 2, 1, 0)[world.rank])  # as torchrun on each of four nodes says
    # rank r sends r + 2 * s bytes to rank s, and nothing where that is 3
    sizes = [[0 if r + 2 * s == 3 else r + 2 * s for s in range(world.size)] for r in range(world.size)]
    outgoing = [torch.full((sizes[world.rank][s],), 10 * world.rank + s, dtype=torch.uint8) for s in range(world.size)]
    incoming, sent = all_to_all(outgoing, world.payload)
    expected = [torch.full((sizes[r][world.rank],), 10 * r + world.rank, dtype=torch.uint8) for r in range(world.size)]

    def made(id: int) -> Sample:
        return Sample.of(id, torch.arange(id + 1), torch.arange(3), pixel_values=torch.full((3, 2, id), id))

    # Each rank makes two samples; data-parallel rank 0 is ranks 0 and 1, and trains on the even ones.
    data_ranks = [rank // 2 for rank in range(world.size)]
    routes = {id: id % 2 for id in range(2 * world.size)}
    held = {id: made(id) for id in (2 * world.rank, 2 * world.rank + 1)}
    got, travelled = exchange(held, {id: routes[id] for id in held}, data_ranks, world.payload)
    own = data_ranks[world.rank]
    wire = {
        data_rank: len(to_wire(one for one in held.values() if routes[one.id] == data_rank)) for data_rank in (0, 1)
    }
    others = [rank for rank in range(world.size) if rank != world.rank]
    report(
        world.rank,
        {
            "threads": _threads(world.size),
            "equal": all(torch.equal(a, b) for a, b in zip(incoming, expected, strict=True)),
            "sent_bytes": sent,
            "expected_bytes": sum(n for s, n in enumerate(sizes[world.rank]) if s != world.rank),
            "samples": sorted(got) == [id for id in routes if routes[id] == own]
            and all(
                torch.equal(sample.tokens, made(id).tokens)
                and torch.equal(sample.fields["pixel_values"], made(id).fields["pixel_values"])
                for id, sample in got.items()
            ),
            "restarts": world.restarts(),
            "travelled": travelled == sum(wire[data_ranks[rank]] for rank in others),
        },
    )


def _threads(ranks: int) -> list[int]:
    """Return how many this rank has without twenty groups of all ranks, with them, and when they have ended."""
    import torch
    import torch.distributed as dist

    counts = [len(os.listdir("/proc/self/task"))]
    groups = [dist.new_group(list(range(ranks))) for _ in range(20)]
    for group in groups:
        dist.all_reduce(torch.zeros(1), group=group)
    counts.append(len(os.listdir("/proc/self/task")))
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    del groups, group  # the last that hold them
    return [*counts, len(os.listdir("/proc/self/task"))]
