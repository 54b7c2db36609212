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


def memory_share(free: int, total: int, weights: int, cache: int) -> float:
    """Return the share of a device (gpu_memory_utilization) that vLLM may count on: it refuses to start with less free.

    All are bytes: what is free of the device now, all of it, the engine's weights, its cache. Raises ConfigError where
    weights and cache don't fit.
    """
    if weights + cache > free:
        gib = 2**30
        raise ConfigError(
            Problem(
                "rollout.cache_gib",
                f"{cache / gib:.2f}",
                f"the engine's weights on this rank are {weights / gib:.2f} GiB, and {free / gib:.2f} of the device's "
                f"{total / gib:.2f} GiB are free while nothing is trained",
                "a smaller cache, a larger rollout.tensor (each rank then has a smaller part of the weights), or end "
                "what else holds memory of the device",
            )
        )
    return min(_SHARE, _OF_FREE * free / total)
