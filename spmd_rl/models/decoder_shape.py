"""Read of a config.json what all decoders say in the same words; absent values are what the families assume."""

from typing import Any

from spmd_rl.models.blocks import Experts
from spmd_rl.models.family import OTHER, Content, Refusal

_SCALINGS = ("linear", "llama3", "yarn")


def decoder_shape(content: Content) -> dict[str, Any]:
    """Return the sizes of a dense decoder with ordinary attention, as fields of ModelShape."""
    hidden, heads = int(content["hidden_size"]), int(content["num_attention_heads"])
    theta, scaling = rope(content)
    return {
        "layers": int(content["num_hidden_layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(content.get("num_key_value_heads") or heads),
        "head_dim": int(content.get("head_dim") or hidden // heads),
        "ffn": int(content["intermediate_size"]),
        "vocabulary": int(content["vocab_size"]),
        "tied": bool(content.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "qk_norm": False,
        "rms_epsilon": float(content.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": int(content["max_position_embeddings"]),
    }


def qwen_experts(content: Content, shared_ffn: int = 0) -> Experts:
    """Return the experts of a Qwen model; `shared_ffn`: channels of its shared expert, which has a gate."""
    step, dense_layers = int(content.get("decoder_sparse_step", 1)), content.get("mlp_only_layers") or []
    layers = range(int(content["num_hidden_layers"]))
    return Experts(
        count=int(content["num_experts"] if "num_experts" in content else content["num_local_experts"]),
        per_token=int(content["num_experts_per_tok"]),
        ffn=int(content["moe_intermediate_size"]),
        shared_ffn=shared_ffn,
        shared_gate=shared_ffn > 0,
        sparse=tuple(layer not in dense_layers and (layer + 1) % step == 0 for layer in layers),
        scores="softmax",
        normalized=bool(content.get("norm_topk_prob", False)),
        bias=False,
        groups=1,
        groups_per_token=1,
        scale=1.0,
    )


def rope(content: Content) -> tuple[float, dict[str, Any] | None]:
    """Return theta and scaling of rotary positions.

    Reads them as transformers 4 wrote them (rope_theta, rope_scaling) and as 5 does (rope_parameters).
    """
    found = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or content.get("rope_theta") or 10000.0
    return float(theta), None if kind == "default" else {"rope_type": kind, **found}


def _readable(quantized: object) -> bool:
    """Return whether weights are stored as they are computed with, or in float8 with a scale for each block."""
    if not quantized:
        return True
    return isinstance(quantized, dict) and quantized.get("quant_method") == "fp8" and "weight_block_size" in quantized


def decoder_refusals(content: Content) -> list[Refusal]:
    """Return what no family computes."""
    refused: list[Refusal] = []
    for key in ("attention_bias", "mlp_bias"):
        if content.get(key):
            refused.append((f"{key} is set, which is not supported", OTHER))
    if content.get("hidden_act", "silu") != "silu":
        refused.append((f"hidden_act is {content['hidden_act']}", "supported is silu"))
    if content.get("use_sliding_window") or "sliding_attention" in (content.get("layer_types") or []):
        refused.append(("it uses sliding-window attention, which is not supported", OTHER))
    if not _readable(content.get("quantization_config")):
        refused.append(("its weights are quantized", "use the original weights, or a copy in bfloat16"))
    _, scaling = rope(content)
    if scaling is not None and scaling["rope_type"] not in _SCALINGS:
        met = f"its rotary positions are scaled by {scaling['rope_type']}"
        refused.append((met, f"supported are {', '.join(_SCALINGS)}"))
    return refused


def plain_refusals(content: Content) -> list[Refusal]:
    """Return what families with ordinary attention don't compute."""
    _, scaling = rope(content)
    refused = decoder_refusals(content)
    if scaling is not None and scaling.get("attention_factor") is not None:
        refused.append(("attention_factor is set for its rotary positions, which is not supported", "leave it out"))
    return refused
