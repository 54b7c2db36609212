"""The weights of an engine's model, written one parameter at a time, and its memory where vLLM's sleep mode has it."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


class Weights(Mapping[str, torch.Tensor]):
    """Name -> plain parameter, for the one who writes it; `written` says that it is complete."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        attentions = [module for module in model.modules() if hasattr(module, "W_UK_T")]
        # What latent attention computes from its kv_b_proj is nobody's to write.
        derived = {id(p) for one in attentions for p in one.parameters(recurse=False)}
        self._parameters = {name: p for name, p in model.named_parameters() if id(p) not in derived}
        self._attentions = {
            name: [one for one in attentions if one.kv_b_proj.weight is parameter]
            for name, parameter in self._parameters.items()
        }
        self.kept: frozenset[str] = frozenset()
        """Parameters that are written once, and outlive every sleep afterwards."""
        self.held: frozenset[str] = frozenset()
        """Those of them that were written."""
        self._missing = set(self._parameters)
        self._replaced: list[str] = []

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the plain parameter, with room for its values."""
        return self.plain(name)

    def plain(self, name: str) -> torch.Tensor:
        """Return the plain parameter as it is: on a CPU without memory once it is packed."""
        return self._parameters[name].data

    def begin(self) -> None:
        """Have all parameters written again, but for those that were kept."""
        self._missing = self._parameters.keys() - self.held

    def replaced(self, before: Mapping[str, torch.nn.Parameter]) -> None:
        """Write from now on into the parameters that took the places of those `before`.

        vllm-ascend up to 0.25 keeps the weights of experts transposed, and puts transposed views of them into the model
        when they wake: those have the layout that a refresh writes.
        """
        now = dict(self.model.named_parameters())
        self._replaced = [name for name in self._parameters if now[name] is not before[name]]
        for name in self._replaced:
            assert now[name].shape == before[name].transpose(1, 2).shape, f"{name}: {now[name].shape}"
            self._parameters[name] = now[name]

    def written(self, name: str) -> None:
        """Do what vLLM does after loading a parameter that is now complete and proved."""
        self._missing.remove(name)
        for attention in self._attentions[name]:
            attention.process_weights_after_loading(self.dtype)

    def end(self) -> None:
        """Check that the engine can use its weights: every one is there."""
        assert not self._missing, f"{len(self._missing)} parameters were not written: {sorted(self._missing)[:3]} ..."
        for name in self._replaced:  # as it computes with them, in the memory where they are
            owner, _, attribute = name.rpartition(".")
            runs = torch.nn.Parameter(self._parameters[name].data.transpose(1, 2), requires_grad=False)
            setattr(self.model.get_submodule(owner), attribute, runs)
        self._replaced = []
        self.held = self.kept


class SleepMode:
    """The memory of an engine that vLLM itself releases and maps again."""

    def __init__(self, llm: Any, runner: Any):
        self.llm, self.weights = llm, Weights(runner.get_model(), runner.model_config.dtype)
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Tensors that sleep loses, and their values: nobody writes them again."""
        self._kept: dict[str, torch.Tensor] = {}
        """Values of the parameters that are kept, on the host."""

    def sleep(self) -> None:
        """Give the memory of weights and cache back; both are lost."""
        if self._plain is None:
            found = plain_tensors(self.weights.model, _dispatchers())
            self._plain = [(tensor, tensor.to("cpu", copy=True)) for tensor in found]
        if not self._kept:
            self._kept = {name: self.weights.plain(name).to("cpu", copy=True) for name in self.weights.held}
        self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Make room for the weights."""
        before = dict(self.weights.model.named_parameters())
        self.llm.wake_up(tags=["weights"])
        self.weights.replaced(before)
        for tensor, values in self._plain or ():
            tensor.copy_(values)
        for name, values in self._kept.items():
            self.weights.plain(name).copy_(values)

    def wake_cache(self) -> None:
        """Make room for the cache."""
        self.llm.wake_up(tags=["kv_cache"])


_LOOKED_INTO = re.compile(r"vllm(_ascend)?\.(?!compilation|v1\.)")
"""Modules whose objects hold what a model computes with; compiled graphs hold activations, which nobody misses."""
_DERIVED = frozenset({"W_UK_T", "W_UK", "W_UV"})
"""Names of what latent attention computes anew when its kv_b_proj is written."""
_CACHES = frozenset({"kv_cache", "kv_caches"})


def _dispatchers() -> list[object]:
    """Return what sends tokens to experts on an NPU: vllm-ascend keeps it beside the model."""
    if "vllm_ascend" not in sys.modules:
        return []
    from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods

    return [method.token_dispatcher for method in _MoECommMethods.values()]


def plain_tensors(model: torch.nn.Module, others: Sequence[object] = ()) -> list[torch.Tensor]:
    """Return the tensors that a model computes with and that are neither parameters nor buffers, of `others` too.

    vLLM's sleep of level 2 keeps the values of buffers alone: with other things lost (which rank has which expert, say)
    a model goes on, with fluent text and wrong. Found are those of modules, and of the libraries' objects in them.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting: list[Any] = [*model.modules(), *others]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.numel() and one.untyped_storage().data_ptr() not in known:
                found[id(one)] = one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, torch.nn.Module) or _LOOKED_INTO.match(type(one).__module__):
            parts = vars(one).items() if hasattr(one, "__dict__") else ()
            waiting += [value for name, value in parts if name not in _DERIVED | _CACHES and not name.startswith("__")]
    return list(found.values())
