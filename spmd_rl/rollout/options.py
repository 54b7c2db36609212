"""What vLLM has to be told about a model that it does not find out itself."""

from typing import Any

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform

# The sizes of a latent that the CPU's kernel of latent attention is compiled for, and its blocks.
CPU_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
CPU_LATENT_BLOCK_TOKENS = 16


def model_options(model_path: str, shape: ModelShape, block_tokens: int, platform: Platform) -> dict[str, Any]:
    """Options of `vllm.LLM` for this model on this machine. Raises ValueError where vLLM has no kernels for it."""
    options = dict(platform.engine_options)
    if platform.name != "cpu":
        return options
    options["block_size"] = block_tokens
    if shape.mla is not None:
        found = {"kv_lora_rank": shape.mla.kv_rank, "qk_rope_head_dim": shape.mla.rope_dim}
        if found != CPU_LATENT:
            has, wants = (" and ".join(f"{k} = {v}" for k, v in sizes.items()) for sizes in (found, CPU_LATENT))
            raise ValueError(
                f"model.path = {model_path}: its config.json has {has}; vLLM on a CPU computes latent attention with "
                f"{wants} only. Use such a model, or another platform"
            )
        options["block_size"] = CPU_LATENT_BLOCK_TOKENS
        # The kernels for AMX keep a packed copy of kv_b_proj instead of the weight that a refresh writes.
        options["attention_config"] = {"backend": "CPU_MLA"}
        # The compiled rotary kernel of the CPU takes the slices of latent attention for contiguous: wrong, silently.
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return options
