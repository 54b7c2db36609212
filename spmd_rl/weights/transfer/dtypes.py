"""Agree over all ranks on the dtype of each tensor."""

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.weights.transfer.boxes import Shard


class DTypes:
    """The dtype of each Hugging Face tensor in the source shards of all ranks (they agree, or this raises)."""

    def __init__(self, source: Shard, read: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """A collective. `source`: this rank's shard, `read` its parameters."""
        mine: dict[str, torch.dtype] = {}
        for piece in source.pieces:
            check_same(mine.setdefault(piece.tensor, read[piece.param].dtype), read[piece.param].dtype, piece.tensor)
        # One dtype says it all in most models, so only the exceptions travel by name.
        usual = [_spelling(dtype) for dtype, _ in Counter(mine.values()).most_common(1)]
        usuals = Counter(name for names in gather(usual, group) for name in names)
        self.most = _dtype(usuals.most_common(1)[0][0])
        self._exceptions: dict[str, torch.dtype] = {}
        exceptions = {name: _spelling(dtype) for name, dtype in mine.items() if dtype != self.most}
        for others in gather(exceptions, group):
            for name, spelled in others.items():
                check_same(self._exceptions.setdefault(name, _dtype(spelled)), _dtype(spelled), name)
        for name, dtype in mine.items():
            check_same(self.of(name), dtype, name)

    def of(self, tensor: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._exceptions.get(tensor, self.most)


def check_same(a: torch.dtype, b: torch.dtype, tensor: str) -> None:
    """Assert that a tensor has one dtype on both sides."""
    assert a == b, f"{tensor} is {a} in one shard and {b} in another"


def _spelling(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(spelling: str) -> torch.dtype:
    found = getattr(torch, spelling)
    assert isinstance(found, torch.dtype), spelling
    return found
