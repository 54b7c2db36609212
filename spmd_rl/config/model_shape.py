"""What a model's config.json says of its size: all that layouts, memory and checks need, without loading anything."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import ConfigError

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    """As in config.json, e.g. LlamaForCausalLM."""
    model_type: str
    family: str
    """llama, qwen2 or qwen3: whose table of weights describes it."""
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


def read_model_shape(path: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory; ConfigError says what is wrong with it.

    Reads rotary settings as transformers 4 wrote them (rope_theta, rope_scaling) and as 5 does (rope_parameters).
    """
    file = Path(path) / "config.json"
    content = _read_json(path, file)
    architectures = content.get("architectures") or []
    architecture = architectures[0] if architectures else None
    if architecture not in FAMILIES:
        raise ConfigError(
            f"model.path = {path}: the architecture in its config.json is {architecture}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architecture]
    try:
        shape = _shape(content, architecture, family, _eos_token_ids(path, content))
    except KeyError as error:
        raise ConfigError(f"model.path = {path}: {file} has no {error}; copy the model's directory again") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.path = {path}: {file} cannot be understood: {error}") from error
    refused = _refused(content, family)
    if refused:
        raise ConfigError([f"model.path = {path}: {what}" for what in refused])
    return shape


def _shape(content: dict[str, Any], architecture: str, family: str, eos_token_ids: tuple[int, ...]) -> ModelShape:
    hidden, heads = int(content["hidden_size"]), int(content["num_attention_heads"])
    # Absent values: what the families' own configuration classes assume.
    head_dim = content.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    theta, scaling = _rope(content)
    return ModelShape(
        architecture=architecture,
        model_type=str(content.get("model_type", family)),
        family=family,
        layers=int(content["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(content.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        ffn=int(content["intermediate_size"]),
        vocabulary=int(content["vocab_size"]),
        tied=bool(content.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rms_epsilon=float(content.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=int(content["max_position_embeddings"]),
        eos_token_ids=eos_token_ids,
    )


def _rope(content: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or content.get("rope_theta") or 10000.0
    return float(theta), None if kind == "default" else {"rope_type": kind, **rope}


def _refused(content: dict[str, Any], family: str) -> list[str]:
    """What these architectures can be configured to and we do not compute; better said than computed wrongly."""
    refused = []
    if content.get("attention_bias"):
        refused.append(f"attention_bias is set, which is not supported in {family} models")
    if content.get("mlp_bias"):
        refused.append(f"mlp_bias is set, which is not supported in {family} models")
    if content.get("hidden_act", "silu") != "silu":
        refused.append(f"hidden_act is {content['hidden_act']}; supported is silu")
    windowed = content.get("use_sliding_window") or "sliding_attention" in (content.get("layer_types") or [])
    if windowed:
        refused.append("it uses sliding-window attention, which is not supported")
    if content.get("quantization_config"):
        refused.append("its weights are quantized; use the original weights")
    return refused


def _eos_token_ids(path: str | Path, content: dict[str, Any]) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    generation = _read_json(path, file) if file.is_file() else {}
    ids: list[int] = []
    for value in (content.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _read_json(path: str | Path, file: Path) -> dict[str, Any]:
    if not Path(path).is_dir():
        raise ConfigError(f"model.path = {path}: there is no such directory; it must be a Hugging Face model directory")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"model.path = {path}: there is no {file.name} in it; is it a Hugging Face directory?"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path = {path}: {file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path = {path}: {file.name} holds {type(content).__name__}, not an object")
    return content
