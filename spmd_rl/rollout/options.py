"""Options that vLLM needs for a model and does not find out itself."""

from pathlib import Path

from spmd_rl.config.engine_cache import REST_BYTES
from spmd_rl.config.rollout_config import EngineConfig
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.models.quantized import block_size
from spmd_rl.platforms.platform import Platform


def model_options(
    model_path: str, shape: ModelShape, block_tokens: int, platform: Platform, knob: str = "model.path"
) -> dict[str, object]:
    """Return the options of `vllm.LLM` for this model here. Raises ConfigError where vLLM has no kernels for it.

    `knob`: the setting that names the model.
    """
    options = {**platform.engine_options, **platform.engine_model_options(model_path, shape, block_tokens, knob)}
    if block_size(Path(model_path)) is not None:
        # The weights that a refresh writes are not quantized, whatever the directory's are.
        options["hf_overrides"] = {"quantization_config": None}
    return options


def switches(settings: EngineConfig, platform: Platform) -> dict[str, object]:
    """Return the options of `vllm.LLM` that the settings turn. Raises ConfigError for graphs where there are none."""
    if settings.eager is False and not platform.engine_graphs:
        met = "on such a machine the engine has no graphs: its weights are written in place, layer by layer"
        raise ConfigError(Problem(f"{settings.prefix}eager", False, met, "leave it out"))
    found: dict[str, object] = {"enable_prefix_caching": settings.prefix_caching}
    if settings.eager is not None:
        found["enforce_eager"] = settings.eager
    if settings.max_batched_tokens is not None:
        found["max_num_batched_tokens"] = settings.max_batched_tokens
    return found


_SHARE, _OF_FREE = 0.92, 0.98


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
