"""The weights and the memory of an engine on a CPU, whose layers multiply with packed copies of the weights.

A plain parameter takes memory from the first access to `written` only, unless something reads it as it is.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_rl.patches.vllm_packing import Packed, packed_of
from spmd_rl.platforms import current
from spmd_rl.rollout.engine_weights import Weights


@dataclass
class _Memory:
    """Hold the memory of a parameter, and who reads it."""

    held: torch.nn.Parameter
    """The engine's layers read this; between refreshes its memory may be someone else's."""
    plain: torch.Tensor
    """Its own memory."""
    nbytes: int
    packers: list[tuple[Packed, str]] = field(default_factory=list)
    """Layers that multiply with a packed copy of it, and what they call it."""
    read_plain: bool = False
    """Somebody reads it as it is: a tied output layer's weight is the embedding."""

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> "_Memory":
        return cls(parameter, parameter.data, parameter.untyped_storage().nbytes())

    def make_room(self) -> None:
        storage = self.plain.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.nbytes)

    def release(self) -> None:
        """Give its own memory back, and what was lent to whom it belongs."""
        self.held.data = self.plain
        self.plain.untyped_storage().resize_(0)


class PackedWeights(Weights):
    """Plain parameters that are packed as soon as they are complete."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__(model, dtype)
        holders: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                holders[id(parameter)].append((module, name))
        self._memory = {name: _Memory.of(parameter) for name, parameter in self._parameters.items()}
        for memory in self._memory.values():
            for module, attribute in holders[id(memory.held)]:
                packed = packed_of(module)
                if packed is not None and attribute in packed.names:
                    memory.packers.append((packed, attribute))
                else:
                    memory.read_plain = True
        self._derived = {
            id(one): [_Memory.of(parameter) for parameter in one.parameters(recurse=False)]
            for attentions in self._attentions.values()
            for one in attentions
        }
        self._lent: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._lent:
            return self._lent[name]
        if name in self.held:
            return self._memory[name].held.data
        assert name in self._missing, f"{name} is written, and packed"
        self._memory[name].make_room()
        return self._memory[name].plain

    def lend(self, name: str, values: torch.Tensor) -> bool:
        """Take values for a parameter as they are, if they will do: they are packed, and read, where they lie.

        Who lends them leaves them alone until `release`.
        """
        # What is offloaded while the engine works has no values to read.
        plain, usable = self._memory[name].plain, values.is_contiguous() and not current().offloads
        if usable:
            assert values.shape == plain.shape and values.dtype == plain.dtype, name
            self._lent[name] = values.detach()
        return usable

    def begin(self) -> None:
        super().begin()
        self._lent.clear()

    def written(self, name: str) -> None:
        """Do what vLLM does after loading a parameter, pack it, and release it if that was all."""
        memory = self._memory[name]
        memory.held.data = values = self._lent.pop(name, memory.plain)
        for attention in self._attentions[name]:
            for derived in self._derived[id(attention)]:
                derived.make_room()
        super().written(name)
        packs = [packed.pack(attribute, values) for packed, attribute in memory.packers]
        # Without a packed form on this machine the layers read it as it is.
        if not memory.read_plain and all(packs) and name not in self.kept:
            memory.release()

    def release(self) -> None:
        """Give all memory back; the values are lost, but for those that are kept."""
        own = [memory for name, memory in self._memory.items() if name not in self.held]
        for memory in (*own, *(one for derived in self._derived.values() for one in derived)):
            memory.release()
            for packed, attribute in memory.packers:
                packed.unpack(attribute)
        self.begin()


class OwnStorages:
    """The memory of an engine that cannot sleep: the storages of its tensors."""

    def __init__(self, llm: Any, runner: Any):
        self.weights = PackedWeights(runner.get_model(), runner.model_config.dtype)
        self._runner = runner
        self._cache: list[tuple[torch.UntypedStorage, int]] = []

    def sleep(self) -> None:
        """Give the memory of weights and cache back; both are lost."""
        self.weights.release()
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(self._runner.kv_caches)
        }
        self._cache = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def wake_weights(self) -> None:
        """Do nothing: each parameter gets room when it is written."""

    def wake_cache(self) -> None:
        """Make room for the cache, of zeros: vLLM multiplies slots that no token filled with 0, and nan stays nan."""
        for storage, nbytes in self._cache:
            storage.resize_(nbytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        self._cache = []


def _tensors(caches: Any) -> list[torch.Tensor]:
    """The tensors of vLLM's cache list, which nests where layers hold several."""
    if isinstance(caches, torch.Tensor):
        return [caches]
    return [tensor for cache in caches for tensor in _tensors(cache)]
