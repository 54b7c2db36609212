"""One all-to-all of samples: each travels at most once, from the rank that made it to the ranks that train on it."""

import torch
import torch.distributed as dist


def exchange(outgoing: list[torch.Tensor], group: dist.ProcessGroup) -> tuple[list[torch.Tensor], int]:
    """Give every rank what is meant for it.

    `outgoing[r]` is a 1-d int32 tensor for rank r. Returns what each rank sent to this one, and the bytes
    that this rank sent to others.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return list(outgoing), 0
    lengths = torch.tensor([part.numel() for part in outgoing], dtype=torch.int64)
    incoming_lengths = torch.empty_like(lengths)
    dist.all_to_all_single(incoming_lengths, lengths, group=group)
    received = torch.empty(int(incoming_lengths.sum()), dtype=torch.int32)
    dist.all_to_all_single(received, torch.cat(outgoing), incoming_lengths.tolist(), lengths.tolist(), group=group)
    sent = sum(part.numel() for other, part in enumerate(outgoing) if other != rank) * 4
    return list(received.split(incoming_lengths.tolist())), sent
