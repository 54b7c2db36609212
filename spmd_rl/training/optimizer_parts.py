"""Part an optimizer's state, so that one part after another is on the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from spmd_rl.platforms import current
from spmd_rl.training.offload import Offloaded
from spmd_rl.weights.device_memory import PART_BYTES, STATE_BYTES, parts_of_sizes

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_ALIKE = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
"""Megatron's lists of parameters, group by group; those of a line name the same ones in the same order."""


class Part:
    """Hold some of the parameters of one of Megatron's optimizers, and what it keeps of them."""

    def __init__(self, inner: DistributedOptimizer, parameters: Sequence[torch.nn.Parameter], model: set[int]):
        """`parameters`: the model's. `model`: its storages, which wait elsewhere."""
        self.inner, self.parameters = inner, parameters
        own = set(map(id, parameters))
        self._mains: list[list[torch.Tensor]] = [[] for _ in inner.optimizer.param_groups]
        """Of each group: what the optimizer steps, in half precision a float32 copy of this rank's share."""
        for parameter in parameters:
            group, main = _main(inner, parameter)
            self._mains[group].append(main)
        self._lists = {
            name: [
                [one for one, of in zip(group, models, strict=True) if id(of) in own]
                for group, models in zip(getattr(inner, name), getattr(inner, names[0]), strict=True)
            ]
            for names in _ALIKE
            for name in names
        }
        # In fp32 the optimizer steps the model's own parameters.
        mains = [main.data for group in self._mains for main in group]
        self._weights = Offloaded([main for main in mains if main.untyped_storage()._cdata not in model])
        self._moments = Offloaded(())

    def offload(self) -> None:
        """Move to the host. The moments come into being with the first step."""
        self._weights.offload()
        moments = [value for name, value in self.tensors() if name != "main parameter" and value.dim() > 0]
        if self._moments.count != len(moments):
            self._moments = Offloaded(moments)
        self._moments.offload()

    def onload(self) -> None:
        """Move back to the device."""
        self._weights.onload()
        self._moments.onload()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the optimizer keeps, by its name."""
        for main in (main for group in self._mains for main in group):
            state = self.inner.optimizer.state.get(main, {})
            yield from ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
            yield "main parameter", main

    def step(self) -> None:
        """Update these parameters, and this rank's share of the model's weights."""
        with self._alone():
            self.inner.optimizer.step()
            self.inner._copy_main_params_to_model_params()

    def take_weights(self) -> None:
        """Copy this rank's share of the model's weights."""
        with self._alone():
            self.inner.reload_model_params()

    def begin_state(self) -> None:
        """Give parameters that no step was made with the state before the first: a count and moments of 0."""
        optimizer = self.inner.optimizer
        for group, mains in zip(optimizer.param_groups, self._mains, strict=True):
            for main in mains:
                if not main.numel() or main in optimizer.state:
                    continue
                state = optimizer.state[main]
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(main), torch.zeros_like(main)
                if isinstance(optimizer, torch.optim.Adam):  # AdamW is one; fused ones of others count by group
                    state["step"] = torch.zeros((), dtype=torch.float32)
                else:
                    group.setdefault("step", 0)

    def make_state(self) -> None:
        """Have moments to load into; what they and the weights hold is undefined."""
        with self._alone():
            self.inner._init_optimizer_states_with_dummy_values()

    def fill(self, states: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Load weights and moments. `states`: by parameter of the model."""
        for parameter in self.parameters:
            self.inner._set_main_param_and_optimizer_states(parameter, states[parameter])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have Megatron's optimizer know no other parameters inside."""
        groups = self.inner.optimizer.param_groups
        lists, params = {name: getattr(self.inner, name) for name in self._lists}, [group["params"] for group in groups]
        self._know(self._lists, self._mains)
        try:
            yield
        finally:
            self._know(lists, params)

    def _know(self, lists: Mapping[str, list[list[torch.Tensor]]], params: Sequence[list[torch.Tensor]]) -> None:
        for name, value in lists.items():
            setattr(self.inner, name, value)
        for group, some in zip(self.inner.optimizer.param_groups, params, strict=True):
            group["params"] = some


def parts_of(inner: DistributedOptimizer, model: set[int]) -> list[Part]:
    """Part the state of one of Megatron's optimizers, in the order in which it is saved; a CPU has it in one.

    `model`: the storages of the model's weights.
    """
    owned = inner.model_param_group_index_map
    parameters = [one for buffer in inner.buffers for one in buffer.param_index_map if one in owned]
    sizes = [STATE_BYTES * _main(inner, one)[1].numel() for one in parameters]
    cuts = parts_of_sizes(sizes, PART_BYTES if current().offloads else sys.maxsize)
    return [Part(inner, [parameters[n] for n in cut], model) for cut in cuts]


def _main(inner: DistributedOptimizer, parameter: torch.nn.Parameter) -> tuple[int, torch.Tensor]:
    """Return the group of a parameter, and what the optimizer steps for it: this rank's share."""
    group, place = inner.model_param_group_index_map[parameter]
    return group, inner.optimizer.param_groups[group]["params"][place]
