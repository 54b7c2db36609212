"""A rank's part of the optimizer's state, as parts of whole tensors: saved from where it is.

Megatron's `fully_reshardable` form gathers the whole state on every data-parallel rank before it saves. Its files may
as well hold each rank's own part, cut where that does not fall on a whole row: loading puts boxes together anyway.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from spmd_rl.training.checkpoint_boxes import boxes
from spmd_rl.training.optimizer import Optimizer

Pieces = dict[int, dict[str, list[ShardedTensor]]]
"""By number of the parameter and name of the state."""
_STATE = ("param", "exp_avg", "exp_avg_sq")


def save_own_pieces(inner: DistributedOptimizer, optimizer: Optimizer) -> None:
    """Have one of Megatron's distributed optimizers in this one save what is on this rank; it loads as before."""
    inner.sharded_param_state_fully_reshardable = partial(
        _param_state, inner, optimizer, inner.sharded_param_state_fully_reshardable
    )


def _param_state(
    inner: DistributedOptimizer,
    optimizer: Optimizer,
    whole: Callable[..., Pieces],
    model: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> Pieces:
    """Return this rank's pieces."""
    if is_loading:
        return whole(model, is_loading, metadata)
    sharded, _ = extract_sharded_tensors_and_factories(model)
    described = {one.data: one for one in nested_values(sharded)}
    everywhere = (parameter for buffer in inner.buffers for parameter in buffer.param_index_map)
    numbers = {parameter: number for number, parameter in enumerate(everywhere)}
    state = {}
    for part in optimizer.each(inner):
        for parameter in part.parameters:
            held = inner._get_main_param_and_optimizer_states(parameter)
            start = inner._get_model_param_range_map(parameter)["param"].start
            state[numbers[parameter]] = {
                name: [
                    replace(piece, data=piece.data.to("cpu", copy=True)) if optimizer.waits else piece
                    for piece in _pieces(described[parameter], f"optimizer.state.{name}.", start, held[name].detach())
                ]
                for name in _STATE
            }
    return state


def _pieces(whole: Any, prefix: str, start: int, values: torch.Tensor) -> Iterator[ShardedTensor]:
    """The elements from `start` of a parameter, which `values` holds, as boxes.

    `whole`: how the model describes the parameter, or the parts that it is saved in.
    """
    # Data-parallel ranks hold different elements: none of theirs is a copy of another's.
    replica = (*whole.replica_id[:-1], 0)
    parts = [(0, whole)]
    if isinstance(whole, ShardedTensorFactory):
        shape = torch.empty(whole.data.shape, device="meta")
        built = list(nested_values(whole.build_fn(whole.key, shape, replica, None)))
        parts = [(part.data.storage_offset(), part) for part in built]
    for at, part in parts:
        first, last = max(start, at), min(start + values.numel(), at + math.prod(part.local_shape))
        ones = part.prepend_axis_num
        for offset, shape in boxes(part.local_shape, first - at, last - at):
            begun = at + sum(o * math.prod(part.local_shape[axis + 1 :]) for axis, o in enumerate(offset)) - start
            local = (1,) * ones + shape
            yield replace(
                part,
                key=prefix + part.key,
                data=values[begun : begun + math.prod(shape)].view(local),
                dtype=values.dtype,
                local_shape=local,
                global_offset=tuple(a + b for a, b in zip(part.global_offset, (0,) * ones + offset, strict=True)),
                axis_fragmentations=None,
                replica_id=replica,
                prepend_axis_num=0,
            )
