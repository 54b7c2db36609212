"""What a model's config.json says of its size: all that layouts, memory and checks need, without loading anything."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spmd_rl.errors import ConfigError, Problem, refuse

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
# The same models with a score head in place of the language-model head: reward models and critics.
VALUE_FAMILIES = {
    name.replace("ForCausalLM", "ForSequenceClassification"): family
    for name, family in FAMILIES.items()
    if family != "deepseek_v3"
}


@dataclass(frozen=True)
class Experts:
    """The sparse feed-forward blocks of a model."""

    count: int
    """Routed experts of a sparse layer."""
    per_token: int
    ffn: int
    """Channels of one routed expert."""
    shared_ffn: int
    """Channels of all shared experts of a layer together; 0: none."""
    shared_gate: bool
    """A learned gate scales the shared experts (Qwen2-MoE)."""
    sparse: tuple[bool, ...]
    """For each layer, whether its feed-forward block is sparse."""
    scores: Literal["softmax", "sigmoid"]
    normalized: bool
    """The weights of the chosen experts are made to sum to 1."""
    bias: bool
    """A bias for each expert takes part in the choice and not in the weights (DeepSeek-V3)."""
    groups: int
    """The experts form so many groups, of which only `groups_per_token` are chosen from; 1: no groups."""
    groups_per_token: int
    scale: float
    """Factor on the weights of the routed experts."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values from a common low-rank projection."""

    q_rank: int
    """0: queries come straight from the hidden state."""
    kv_rank: int
    nope_dim: int
    """Part of a query or key head without positions."""
    rope_dim: int
    """Part with rotary positions; the key's is common to all heads."""
    v_dim: int


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    """As in config.json, e.g. LlamaForCausalLM."""
    model_type: str
    family: str
    """One of FAMILIES' values: whose table of weights describes it."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Not always hidden / heads."""
    ffn: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    rms_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """As transformers 5 writes it, with "rope_type", without "rope_theta". None: plain rotary positions."""
    max_positions: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response, of config.json and generation_config.json together."""
    experts: Experts | None = None
    """None: a dense model."""
    mla: LatentAttention | None = None
    """None: ordinary attention."""
    head: Literal["lm", "value"] = "lm"
    """value: a score head (`score.weight`) of `labels` rows in place of the language-model head."""
    labels: int = 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward block of a layer is one of experts."""
        return self.experts is not None and self.experts.sparse[layer]


def read_model_shape(
    path: str | Path, knob: str = "model.path", head: Literal["lm", "value"] | None = None
) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory; ConfigError says what is wrong with it.

    Reads rotary settings as transformers 4 wrote them (rope_theta, rope_scaling) and as 5 does (rope_parameters).
    `knob`: the setting that names it. `head`: the only one that will do; None: either.
    """
    file = Path(path) / "config.json"
    content = _read_json(path, file, knob)
    architectures = content.get("architectures") or []
    architecture = architectures[0] if architectures else None
    family = VALUE_FAMILIES.get(architecture) or (None if head == "value" else FAMILIES.get(architecture))
    if family is None:
        raise ConfigError(_unsupported(path, knob, architecture, head))
    try:
        shape = _shape(content, architecture, family, _eos_token_ids(path, content, knob))
        refused = _refused(content, family)
    except KeyError as error:
        raise ConfigError(Problem(knob, path, f"{file} has no {error}", "copy the model's directory again")) from error
    except (TypeError, ValueError) as error:
        way = "copy the model's directory again"
        raise ConfigError(Problem(knob, path, f"{file} cannot be understood: {error}", way)) from error
    refuse([Problem(knob, path, met, way) for met, way in refused])
    return shape


def _unsupported(path: str | Path, knob: str, architecture: str | None, head: str | None) -> Problem:
    met = f"the architecture in its config.json is {architecture}"
    if head == "value":
        way = (
            f"a reward model is one of {', '.join(VALUE_FAMILIES)}. A model that writes becomes one by training: "
            "tools/convert_checkpoint.py --head value gives it a score head to start from"
        )
        return Problem(knob, path, f"{met}, which is not one that scores", way)
    way = f"supported are {', '.join(FAMILIES)}, and the first ones as ...ForSequenceClassification"
    return Problem(knob, path, met, way)


def _shape(content: dict[str, Any], architecture: str, family: str, eos_token_ids: tuple[int, ...]) -> ModelShape:
    hidden, heads = int(content["hidden_size"]), int(content["num_attention_heads"])
    mla = _latent_attention(content) if family == "deepseek_v3" else None
    # Absent values: what the families' own configuration classes assume.
    head_dim = content.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    if mla is not None:
        head_dim = mla.nope_dim + mla.rope_dim
    theta, scaling = _rope(content)
    value_head = architecture in VALUE_FAMILIES
    return ModelShape(
        architecture=architecture,
        model_type=str(content.get("model_type", family)),
        family=family,
        layers=int(content["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if mla is not None else int(content.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        ffn=int(content["intermediate_size"]),
        vocabulary=int(content["vocab_size"]),
        tied=bool(content.get("tie_word_embeddings", False)) and not value_head,
        qkv_bias=family == "qwen2" or (family == "qwen2_moe" and bool(content.get("qkv_bias", True))),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rms_epsilon=float(content.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=int(content["max_position_embeddings"]),
        eos_token_ids=eos_token_ids,
        experts=_experts(content, family),
        mla=mla,
        head="value" if value_head else "lm",
        labels=_labels(content) if value_head else 0,
    )


def _experts(content: dict[str, Any], family: str) -> Experts | None:
    layers = int(content["num_hidden_layers"])
    if family == "deepseek_v3":
        dense = int(content.get("first_k_dense_replace", 3))
        ffn = int(content["moe_intermediate_size"])
        return Experts(
            count=int(content["n_routed_experts"]),
            per_token=int(content["num_experts_per_tok"]),
            ffn=ffn,
            shared_ffn=ffn * int(content.get("n_shared_experts") or 0),
            shared_gate=False,
            sparse=tuple(layer >= dense for layer in range(layers)),
            scores="sigmoid",
            normalized=bool(content.get("norm_topk_prob", True)),
            bias=True,
            groups=int(content.get("n_group") or 1),
            groups_per_token=int(content.get("topk_group") or 1),
            scale=float(content.get("routed_scaling_factor", 1.0)),
        )
    if family not in ("qwen2_moe", "qwen3_moe"):
        return None
    step, dense_layers = int(content.get("decoder_sparse_step", 1)), content.get("mlp_only_layers") or []
    return Experts(
        count=int(content["num_experts"] if "num_experts" in content else content["num_local_experts"]),
        per_token=int(content["num_experts_per_tok"]),
        ffn=int(content["moe_intermediate_size"]),
        shared_ffn=int(content["shared_expert_intermediate_size"]) if family == "qwen2_moe" else 0,
        shared_gate=family == "qwen2_moe",
        sparse=tuple(layer not in dense_layers and (layer + 1) % step == 0 for layer in range(layers)),
        scores="softmax",
        normalized=bool(content.get("norm_topk_prob", False)),
        bias=False,
        groups=1,
        groups_per_token=1,
        scale=1.0,
    )


def _latent_attention(content: dict[str, Any]) -> LatentAttention:
    return LatentAttention(
        q_rank=int(content.get("q_lora_rank") or 0),
        kv_rank=int(content["kv_lora_rank"]),
        nope_dim=int(content["qk_nope_head_dim"]),
        rope_dim=int(content["qk_rope_head_dim"]),
        v_dim=int(content["v_head_dim"]),
    )


def _labels(content: dict[str, Any]) -> int:
    return int(content.get("num_labels") or len(content.get("id2label") or {}) or 2)


def _rope(content: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or content.get("rope_theta") or 10000.0
    return float(theta), None if kind == "default" else {"rope_type": kind, **rope}


_OTHER = "take another model"


def _refused(content: dict[str, Any], family: str) -> list[tuple[str, str]]:
    """Return what these architectures can be configured to and we do not compute, and the ways out."""
    refused = []
    for key in ("attention_bias", "mlp_bias"):
        if content.get(key):
            refused.append((f"{key} is set, which is not supported in {family} models", _OTHER))
    if content.get("hidden_act", "silu") != "silu":
        refused.append((f"hidden_act is {content['hidden_act']}", "supported is silu"))
    if content.get("use_sliding_window") or "sliding_attention" in (content.get("layer_types") or []):
        refused.append(("it uses sliding-window attention, which is not supported", _OTHER))
    if content.get("quantization_config"):
        refused.append(("its weights are quantized", "use the original weights, or a copy in bfloat16"))
    _, scaling = _rope(content)
    if family != "deepseek_v3" and scaling is not None and scaling.get("attention_factor") is not None:
        refused.append(("attention_factor is set for its rotary positions, which is not supported", "leave it out"))
    known = ("linear", "llama3", "yarn")
    if scaling is not None and scaling["rope_type"] not in known:
        met = f"its rotary positions are scaled by {scaling['rope_type']}"
        refused.append((met, f"supported are {', '.join(known)}"))
    if family == "deepseek_v3":
        experts = _experts(content, family)
        assert experts is not None
        # Megatron scores a group of experts by its best per_token / groups_per_token, transformers and vLLM by two.
        if experts.groups > 1 and experts.per_token // experts.groups_per_token != 2:
            met = f"num_experts_per_tok = {experts.per_token} with topk_group = {experts.groups_per_token}"
            refused.append((met, "supported is twice as many experts as groups for a token, as in DeepSeek-V3"))
        if not experts.normalized:
            refused.append(("norm_topk_prob is off, which is not supported with sigmoid scores", _OTHER))
        if content.get("rope_interleave") is False:
            refused.append(("rope_interleave is off, which is not supported in deepseek_v3 models", _OTHER))
        for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if content.get(key, only) != only:
                refused.append((f"{key} is {content[key]}", f"supported is {only}"))
    return refused


def _eos_token_ids(path: str | Path, content: dict[str, Any], knob: str) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    generation = _read_json(path, file, knob) if file.is_file() else {}
    ids: list[int] = []
    for value in (content.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _read_json(path: str | Path, file: Path, knob: str) -> dict[str, Any]:
    if not Path(path).is_dir():
        raise ConfigError(Problem(knob, path, "there is no such directory", "name a Hugging Face model directory"))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        way = "is it a Hugging Face directory?"
        raise ConfigError(Problem(knob, path, f"there is no {file.name} in it", way)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(knob, path, f"{file.name} is not valid JSON: {error}", "fetch it again")) from error
    if not isinstance(content, dict):
        met = f"{file.name} holds {type(content).__name__}, not an object"
        raise ConfigError(Problem(knob, path, met, "fetch it again"))
    return content
