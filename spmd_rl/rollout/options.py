"""Options that vLLM needs for a model and does not find out itself."""

from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform


def model_options(
    model_path: str, shape: ModelShape, block_tokens: int, platform: Platform, knob: str = "model.path"
) -> dict[str, object]:
    """Return the options of `vllm.LLM` for this model here. Raises ConfigError where vLLM has no kernels for it.

    `knob`: the setting that names the model.
    """
    return {**platform.engine_options, **platform.engine_model_options(model_path, shape, block_tokens, knob)}


_SHARE, _OF_FREE = 0.92, 0.98
REST_BYTES = 4 << 30
"""Of a device, for what is neither weights nor cache: activations, graphs, buffers of the ranks' messages."""


def memory_of_engine(free: int, total: int, weights: int, cache: int | None) -> tuple[float, int]:
    """Return the share of a device (gpu_memory_utilization) that vLLM may count on, and the bytes of its cache.

    vLLM refuses to start where less than its share is free. All are bytes: what is free of the device now, all of it,
    the engine's weights, its cache (None: what is left). Raises ConfigError where they don't fit.
    """
    size = free - weights - REST_BYTES if cache is None else cache
    if size <= 0 or weights + size > free:
        gib = 2**30
        left = f", and {REST_BYTES / gib:.2f} GiB are left for all else" if cache is None else ""
        raise ConfigError(
            Problem(
                "rollout.cache_gib",
                None if cache is None else f"{cache / gib:.2f}",
                f"the engine's weights on this rank are {weights / gib:.2f} GiB, and {free / gib:.2f} of the device's "
                f"{total / gib:.2f} GiB are free while nothing is trained{left}",
                "a smaller cache, a larger rollout.tensor (each rank then has a smaller part of the weights), or end "
                "what else holds memory of the device",
            )
        )
    return min(_SHARE, _OF_FREE * free / total), size
