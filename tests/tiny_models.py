"""Tiny random models as Hugging Face directories, for tests and for trying a layout without a real model."""

import shutil
from pathlib import Path

FAMILIES = ("llama", "qwen2", "qwen3")


def make_tiny(
    directory: str | Path,
    family: str,
    *,
    tied: bool = False,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocabulary: int = 515,
    ffn: int = 256,
    max_positions: int = 512,
    rope_parameters: dict | None = None,
    seed: int = 7,
    dtype: str = "float32",
    tokenizer: str | Path | None = None,
) -> Path:
    """A random model of one family: config.json and model.safetensors, the same bytes for the same arguments.

    The vocabulary is odd on purpose, so that tensor parallelism has to pad it. head_dim None: 64 for qwen3 (there it
    is not hidden / heads, as in the real ones), hidden / heads for the others. Norm weights and biases are random too:
    a table that mixes two of them up is then found out. tokenizer: a directory whose tokenizer files are copied.
    """
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    if family not in classes:
        raise ValueError(f"family = {family!r}: there are tiny models of {', '.join(FAMILIES)}")
    if head_dim is None and family == "qwen3":
        head_dim = 64
    if head_dim is not None and family == "qwen2" and head_dim != hidden // heads:
        raise ValueError(f"head_dim = {head_dim}: qwen2 has hidden / heads = {hidden // heads}; leave it out")
    make_config, make_model = classes[family]
    config = make_config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5 if family == "llama" else 1e-6,
        tie_word_embeddings=tied,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 5e5 if family == "llama" else 1e6},
        bos_token_id=1,
        eos_token_id=2,
        **({} if head_dim is None else {"head_dim": head_dim}),
    )
    config.dtype = getattr(torch, dtype)
    model = make_model(config)
    _randomize(model, seed)
    directory = Path(directory)
    model.to(config.dtype).save_pretrained(directory)
    if tokenizer is not None:
        for file in Path(tokenizer).iterdir():
            if file.name.startswith("tokenizer") or file.name in ("special_tokens_map.json", "chat_template.jinja"):
                shutil.copy(file, directory)
    return directory


def _randomize(model, seed: int) -> None:
    """Weights of a size at which logits differ clearly between tokens and between positions."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (1.0 if "norm" in name else 0.0))
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.08 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
