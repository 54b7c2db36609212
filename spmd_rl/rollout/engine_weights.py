"""The weights of an engine's model: written one parameter at a time, and packed as soon as one is complete."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_rl.patches.vllm_packing import Packed, packed_of


@dataclass
class _Parameter:
    """One plain parameter, and what follows from it."""

    held: torch.nn.Parameter
    """The engine's layers read this; between refreshes its memory may be someone else's."""
    plain: torch.Tensor
    """Its own memory."""
    nbytes: int
    packers: list[tuple[Packed, str]] = field(default_factory=list)
    """Layers that multiply with a packed copy of it, and what they call it."""
    read_plain: bool = False
    """Somebody reads it as it is: a tied output layer's weight is the embedding."""
    derived: list["_Derived"] = field(default_factory=list)
    """Latent attention makes these of its kv_b_proj."""

    def release(self) -> None:
        """Give its own memory back, and what was lent to whom it belongs."""
        self.held.data = self.plain
        self.plain.untyped_storage().resize_(0)


@dataclass
class _Derived:
    """Parameters that an attention layer computes from another one."""

    attention: Any
    parameters: list[_Parameter] = field(default_factory=list)


class Weights(Mapping[str, torch.Tensor]):
    """Name -> plain parameter, for the one who writes it; `written` says that it is complete.

    `releases`: on a CPU, whose layers multiply with packed copies. A plain parameter then takes memory from the first
    access to `written` only, unless something reads it as it is. Elsewhere vLLM's sleep mode owns the memory.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, releases: bool):
        self.dtype, self.releases = dtype, releases
        self._parameters: dict[str, _Parameter] = {}
        self._derived = [_Derived(module) for module in model.modules() if hasattr(module, "W_UK_T")]
        derived = {id(p): one for one in self._derived for p in one.attention.parameters(recurse=False)}
        holders: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                holders[id(parameter)].append((module, name))
        for name, parameter in model.named_parameters():
            found = _Parameter(parameter, parameter.data, parameter.untyped_storage().nbytes())
            if id(parameter) in derived:
                derived[id(parameter)].parameters.append(found)
                continue
            self._parameters[name] = found
            for module, attribute in holders[id(parameter)]:
                packed = packed_of(module)
                if packed is not None and attribute in packed.names:
                    found.packers.append((packed, attribute))
                else:
                    found.read_plain = True
            found.derived = [one for one in self._derived if one.attention.kv_b_proj.weight is parameter]
        self._missing = set(self._parameters)
        self._lent: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The plain parameter, with room for its values."""
        if name in self._lent:
            return self._lent[name]
        parameter = self._parameters[name]
        if self.releases:
            assert name in self._missing, f"{name} is written, and packed"
            _make_room(parameter)
        return parameter.plain

    def lend(self, name: str, values: torch.Tensor) -> bool:
        """Take values for a parameter as they are, if they will do: they are packed, and read, where they lie.

        Who lends them leaves them alone until `release`.
        """
        parameter = self._parameters[name]
        usable = self.releases and values.is_contiguous()
        if usable:
            assert values.shape == parameter.plain.shape and values.dtype == parameter.plain.dtype, name
            self._lent[name] = values.detach()
        return usable

    def plain(self, name: str) -> torch.Tensor:
        """The plain parameter as it is: on a CPU without memory once it is packed."""
        return self._parameters[name].held.data

    def begin(self) -> None:
        """All parameters are to be written again."""
        self._lent.clear()
        self._missing = set(self._parameters)

    def written(self, name: str) -> None:
        """This parameter is complete and proved: do what vLLM does after loading it, and release it if that was all."""
        parameter = self._parameters[name]
        self._missing.remove(name)
        if not self.releases:
            for derived in parameter.derived:
                derived.attention.process_weights_after_loading(self.dtype)
            return
        parameter.held.data = values = self._lent.pop(name, parameter.plain)
        for derived in parameter.derived:
            for other in derived.parameters:
                _make_room(other)
            derived.attention.process_weights_after_loading(self.dtype)
        packs = [packed.pack(attribute, values) for packed, attribute in parameter.packers]
        # Without a packed form on this machine the layers read it as it is.
        if not parameter.read_plain and all(packs):
            parameter.release()

    def end(self) -> None:
        """The engine can use its weights: every one is there."""
        assert not self._missing, f"{len(self._missing)} parameters were not written: {sorted(self._missing)[:3]} ..."

    def release(self) -> None:
        """Give all memory back; the values are lost."""
        derived = (parameter for one in self._derived for parameter in one.parameters)
        for parameter in (*self._parameters.values(), *derived):
            parameter.release()
            for packed, attribute in parameter.packers:
                packed.unpack(attribute)
        self.begin()


def _make_room(parameter: _Parameter) -> None:
    storage = parameter.plain.untyped_storage()
    if not storage.nbytes():
        storage.resize_(parameter.nbytes)
