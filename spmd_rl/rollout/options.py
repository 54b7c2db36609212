"""Options that vLLM needs for a model and does not find out itself."""

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform


def model_options(
    model_path: str, shape: ModelShape, block_tokens: int, platform: Platform, knob: str = "model.path"
) -> dict[str, object]:
    """Return the options of `vllm.LLM` for this model here. Raises ConfigError where vLLM has no kernels for it.

    `knob`: the setting that names the model.
    """
    return {**platform.engine_options, **platform.engine_model_options(model_path, shape, block_tokens, knob)}
