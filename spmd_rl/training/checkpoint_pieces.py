"""A rank's part of the optimizer's state, as parts of whole tensors: saved from where it is.

Megatron's `fully_reshardable` form gathers the whole state on every data-parallel rank before it saves. Its files may
as well hold each rank's own part, cut where that does not fall on a whole row: loading puts boxes together anyway.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from spmd_rl.training.checkpoint_boxes import boxes

_STATE = ("param", "exp_avg", "exp_avg_sq")


def save_own_pieces(optimizer: Any) -> None:
    """Have one of Megatron's distributed optimizers save what is on this rank; it loads as before."""
    optimizer.sharded_param_state_fully_reshardable = partial(
        _param_state, optimizer, optimizer.sharded_param_state_fully_reshardable
    )


def _param_state(
    optimizer: Any, whole: Any, model: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """By number of the parameter and name of the state: this rank's pieces."""
    if is_loading:
        return whole(model, is_loading, metadata)
    sharded, _ = extract_sharded_tensors_and_factories(model)
    described = {one.data: one for one in nested_values(sharded)}
    state, number = {}, 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        [buckets] = ranges.values()
        owned = {parameter: where["param"] for bucket in buckets for parameter, where in bucket["param_map"].items()}
        for parameter in buffer.param_index_map:
            if parameter in owned:
                held = optimizer._get_main_param_and_optimizer_states(parameter)
                start = owned[parameter].start
                state[number] = {
                    name: list(_pieces(described[parameter], f"optimizer.state.{name}.", start, held[name].detach()))
                    for name in _STATE
                }
            number += 1
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
