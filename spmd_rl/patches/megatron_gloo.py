"""Collectives of Megatron-Core in a form that gloo has, or has without a copy of what it sends."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.patches.patch import MEGATRON_CORE, Patch

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core"
_GLOO = "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"


def _gather_padded(original: Any) -> Any:
    """All-gather along the first dimension, whose parts are padded to the longest one where they differ."""

    def gather(part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return original(part, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: part.shape[0]] = part
        gathered = part.new_empty(group.size() * longest, *part.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(gathered.split(longest), output_split_sizes, strict=True)])

    return gather


def _reduce_scatter_padded(original: Any) -> Any:
    """Reduce-scatter along the first dimension, whose parts are padded to the longest one where they differ."""

    def scatter(whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return original(whole, group, input_split_sizes, use_global_buffer)
        longest = max(input_split_sizes)
        padded = whole.new_zeros(group.size(), longest, *whole.shape[1:])
        for row, part in zip(padded, whole.split(list(input_split_sizes)), strict=True):
            row[: part.shape[0]] = part
        mine = whole.new_empty(longest, *whole.shape[1:])
        dist.reduce_scatter_tensor(mine, padded.flatten(0, 1), group=group)
        return mine[: input_split_sizes[group.rank()]]

    return scatter


def sum_in_place(original: Callable[..., object]) -> Callable[..., object]:
    """Sum a buffer of which `part` is this rank's: the whole buffer holds sums afterwards, where a copy of it did.

    Gloo's own reduce-scatter is this all-reduce, of a copy, so the sums are the same to the last bit.
    """

    def reduce_scatter(
        part: torch.Tensor, whole: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool
    ) -> object:
        if async_op or not _is_own_part(part, whole, group):
            return original(part, whole, op=op, group=group, async_op=async_op)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        # The group's own, and not torch's function, which a coalescing manager would make a copy for.
        group.allreduce([whole], options).wait()
        return None

    return reduce_scatter


def gather_in_place(original: Callable[..., object]) -> Callable[..., object]:
    """Gather a buffer of which `part` is this rank's: each rank's part goes where it belongs, and not through a copy."""

    def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> object:
        if async_op or not _is_own_part(part, whole, group):
            return original(whole, part, group=group, async_op=async_op)
        sent = []
        for rank, of_rank in enumerate(whole.chunk(group.size())):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            sent.append(group.broadcast([of_rank], options))
        for one in sent:
            one.wait()
        return None

    return all_gather


def _is_own_part(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    own = whole.chunk(group.size())[group.rank()]
    return whole.is_contiguous() and own.shape == part.shape and own.data_ptr() == part.data_ptr()


PATCHES = (
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
        platforms=("cpu",),
        reason="experts shared by several ranks gather unequal numbers of tokens, and gloo gathers equal ones only",
        upstream=f"{_SOURCE}/tensor_parallel/mappings.py#L114",
        until="gloo gathers parts of unequal size",
        make=_gather_padded,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        platforms=("cpu",),
        reason="experts shared by several ranks scatter unequal numbers of tokens, and gloo scatters equal ones only",
        upstream=f"{_SOURCE}/tensor_parallel/mappings.py#L155",
        until="gloo scatters parts of unequal size",
        make=_reduce_scatter_padded,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func",
        platforms=("cpu",),
        reason="gloo's reduce-scatter sums a copy of all gradients, as large as they are, beside everything of an update",
        upstream=_GLOO,
        until="gloo has a reduce-scatter in place",
        make=sum_in_place,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.distributed.param_and_grad_buffer:dist_all_gather_func",
        platforms=("cpu",),
        reason="gloo's all-gather collects the weights in a second buffer as large as they are, and copies them from there",
        upstream=_GLOO,
        until="gloo gathers into one tensor without another",
        make=gather_in_place,
    ),
)
