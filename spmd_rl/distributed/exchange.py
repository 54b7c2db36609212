"""One all-to-all of samples: each travels at most once, from the rank that made it to the ranks that train on it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from spmd_rl.distributed.sample import Sample, from_wire, to_wire
from spmd_rl.distributed.status import doing


def exchange(
    held: Mapping[int, Sample], routes: Mapping[int, int], data_ranks: Sequence[int], group: dist.ProcessGroup
) -> tuple[dict[int, Sample], int]:
    """Give every rank the samples of its data-parallel rank.

    `routes`: sample of `held` -> the data-parallel rank that it goes to. `data_ranks`: that of each rank. Returns what
    this rank got, by id, and the bytes that it sent to others.
    """
    going: dict[int, list[Sample]] = defaultdict(list)
    for sample, data_rank in routes.items():
        going[data_rank].append(held[sample])
    wires = {data_rank: to_wire(going[data_rank]) for data_rank in set(data_ranks)}
    with doing("exchanges samples"):
        incoming, sent = all_to_all([wires[data_rank] for data_rank in data_ranks], group)
    return {sample.id: sample for wire in incoming for sample in from_wire(wire)}, sent


def all_to_all(outgoing: list[torch.Tensor], group: dist.ProcessGroup) -> tuple[list[torch.Tensor], int]:
    """Send the bytes `outgoing[r]` to rank r. Returns what each rank sent to this one, and the bytes sent to others."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return outgoing, 0
    lengths = torch.tensor([len(part) for part in outgoing], dtype=torch.int64)
    incoming_lengths = torch.empty_like(lengths)
    dist.all_to_all_single(incoming_lengths, lengths, group=group)
    received = torch.empty(int(incoming_lengths.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(outgoing), incoming_lengths.tolist(), lengths.tolist(), group=group)
    sent = sum(len(part) for other, part in enumerate(outgoing) if other != rank)
    return list(received.split(incoming_lengths.tolist())), sent
