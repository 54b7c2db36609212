"""The weights of an engine's model, written one parameter at a time, and its memory where vLLM's sleep mode has it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Weights(Mapping[str, torch.Tensor]):
    """Name -> plain parameter, for the one who writes it; `written` says that it is complete."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        attentions = [module for module in model.modules() if hasattr(module, "W_UK_T")]
        # What latent attention computes from its kv_b_proj is nobody's to write.
        derived = {id(p) for one in attentions for p in one.parameters(recurse=False)}
        self._parameters = {name: p for name, p in model.named_parameters() if id(p) not in derived}
        self._attentions = {
            name: [one for one in attentions if one.kv_b_proj.weight is parameter]
            for name, parameter in self._parameters.items()
        }
        self._missing = set(self._parameters)

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
        """Have all parameters written again."""
        self._missing = set(self._parameters)

    def written(self, name: str) -> None:
        """Do what vLLM does after loading a parameter that is now complete and proved."""
        self._missing.remove(name)
        for attention in self._attentions[name]:
            attention.process_weights_after_loading(self.dtype)

    def end(self) -> None:
        """Check that the engine can use its weights: every one is there."""
        assert not self._missing, f"{len(self._missing)} parameters were not written: {sorted(self._missing)[:3]} ..."


class SleepMode:
    """The memory of an engine that vLLM itself releases and maps again."""

    def __init__(self, llm: Any, runner: Any):
        self.llm, self.weights = llm, Weights(runner.get_model(), runner.model_config.dtype)

    def sleep(self) -> None:
        """Give the memory of weights and cache back; both are lost."""
        self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Make room for the weights."""
        self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Make room for the cache."""
        self.llm.wake_up(tags=["kv_cache"])
