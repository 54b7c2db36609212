"""Qwen3: queries and keys are normalised; a head is 128 wide unless config.json says otherwise."""

from typing import Any

from spmd_rl.models.decoder_rows import DENSE
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals
from spmd_rl.models.family import Content, Family


def _shape(content: Content) -> dict[str, Any]:
    return decoder_shape(content) | {"head_dim": int(content.get("head_dim") or 128), "qk_norm": True}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", DENSE, _shape, plain_refusals)
