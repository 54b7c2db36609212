"""Small things that every rank tells all others, as msgpack.

torch's own collectives for objects unpickle what comes over the network, which runs whatever is written there.
"""

from typing import Any

import msgspec
import torch
import torch.distributed as dist


def gather(item: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather what each rank passes, in the group's order. A collective; without a process group it is the item alone.

    `item`: numbers, texts, bytes, None, and lists, tuples and mappings of them; tuples come back as lists.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [_decoded(_encoded(item))]
    # A group of several backends has gloo for what is on the host.
    device = "cpu" if "gloo" in str(dist.get_backend(group)) else torch.accelerator.current_accelerator()
    message = torch.frombuffer(bytearray(_encoded(item)), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(message)], dtype=torch.int64, device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(message)] = message
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [
        _decoded(said[: int(length)].cpu().numpy().tobytes()) for said, length in zip(everyone, lengths, strict=True)
    ]


_encoded = msgspec.msgpack.encode


def _decoded(message: bytes) -> Any:
    return msgspec.msgpack.decode(message, strict=False)
