"""vLLM's groups of ranks on a CPU: exchanges of unequal sizes, several groups side by side, names of their own."""

import contextlib
import os
import uuid
from typing import Any

import torch
import torch.distributed as dist


def gather_unequal(original: Any) -> Any:
    """All ranks' rows, one rank's after another's."""

    def all_gatherv(
        self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        assert dim == 0
        if not isinstance(input_, torch.Tensor):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
        mine = input_.shape[0]
        sizes = sizes or [mine] * self.world_size
        gathered = input_.new_empty(sum(sizes), *input_.shape[1:])
        # gloo gathers equal sizes only, but sends unequal ones.
        dist.all_to_all_single(
            gathered, torch.cat([input_] * self.world_size), sizes, [mine] * self.world_size, group=self.device_group
        )
        return gathered

    return all_gatherv


def scatter_unequal_sums(original: Any) -> Any:
    """The sum over all ranks of this rank's rows."""

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        assert dim == 0
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        mine = sizes[self.rank_in_group]
        parts = input_.new_empty(self.world_size * mine, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [mine] * self.world_size, sizes, group=self.device_group)
        return parts.unflatten(0, (self.world_size, mine)).sum(0)

    return reduce_scatterv


def rank_within_group(original: Any) -> Any:
    """The data-parallel rank of an engine, counted inside its own group of engines."""

    def __post_init__(self: Any) -> None:
        if self.distributed_executor_backend != "external_launcher":
            original(self)
            return
        rank = os.environ["RANK"]
        group = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        os.environ["RANK"] = str(int(rank) % group)
        try:
            original(self)
        finally:
            os.environ["RANK"] = rank

    return __post_init__


def own_shared_memory(original: Any) -> Any:
    """Shared memory that no other program on the machine uses, and that is gone when this one is killed."""

    def _init_cpu_shm(self: Any) -> int:
        communicator = self.communicator
        name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        dist.broadcast(name, src=communicator.ranks[0], group=communicator.cpu_group)
        self.group_name = f"spmd_rl-{bytes(name.tolist()).hex()}"
        handle = original(self)
        # All ranks have it open now: without its name it lives as long as they do.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{communicator.rank_in_group}")
        return handle

    return _init_cpu_shm
