"""Qwen2 and Qwen2.5: queries, keys and values have a bias."""

from typing import Any

from spmd_rl.models.decoder_rows import DENSE
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals
from spmd_rl.models.family import Content, Family


def _shape(content: Content) -> dict[str, Any]:
    return decoder_shape(content) | {"qkv_bias": True}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", DENSE, _shape, plain_refusals)
