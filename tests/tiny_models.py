"""Tiny random models as Hugging Face directories, for tests and for trying a layout without a real model."""

import json
import shutil
from pathlib import Path

FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3", "qwen2_5_vl")


_STEMS = ("Llama", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "DeepseekV3", "Qwen2_5_VL")
IMAGE_TOKENS = {"vision_start_token_id": 510, "vision_end_token_id": 511, "image_token_id": 512, "video_token_id": 513}
# Two layers with windows of 2 x 2 tokens, two that see whole images.
_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 56,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
    "hidden_act": "silu",
    "in_channels": 3,
    "tokens_per_second": 2,
}
# One dense layer first (deepseek_v3), every second one (qwen3_moe), or none (qwen2_moe).
_SPARSE = {
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 48,
        # The only sizes that vLLM's attention for this family has kernels for on a CPU.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


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
    value_head: bool = False,
    labels: int = 1,
    **others,
) -> Path:
    """A random model of one family: config.json and model.safetensors, the same bytes for the same arguments.

    The vocabulary is odd on purpose, so that tensor parallelism has to pad it. head_dim None: 64 for qwen3 (there it
    is not hidden / heads, as in the real ones), hidden / heads for the others. Norm weights and biases are random too:
    a table that mixes two of them up is then found out. tokenizer: a directory whose tokenizer files are copied.
    value_head: the sequence-classification model of so many labels. others: fields of the family's configuration.
    """
    import torch
    import transformers

    stems = dict(zip(FAMILIES, _STEMS, strict=True))
    if family not in stems:
        raise ValueError(f"family = {family!r}: there are tiny models of {', '.join(FAMILIES)}")
    make_config = getattr(transformers, stems[family] + "Config")
    sees = family == "qwen2_5_vl"
    head = "ForSequenceClassification" if value_head else "ForConditionalGeneration" if sees else "ForCausalLM"
    make_model = getattr(transformers, stems[family] + head)
    if head_dim is None and family in ("qwen3", "qwen3_moe"):
        head_dim = 64
    if head_dim is not None and family == "qwen2" and head_dim != hidden // heads:
        raise ValueError(f"head_dim = {head_dim}: qwen2 has hidden / heads = {hidden // heads}; leave it out")
    if sees and rope_parameters is None:
        width = hidden // heads // 2
        sections = [width - 2 * (width // 3), width // 3, width // 3]
        rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    fields = dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if family == "deepseek_v3" else kv_heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5 if family == "llama" else 1e-6,
        tie_word_embeddings=tied,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 5e5 if family == "llama" else 1e6},
        bos_token_id=1,
        eos_token_id=2,
        **({} if head_dim is None else {"head_dim": head_dim}),
        **({"num_labels": labels, "pad_token_id": 0} if value_head else {}),
        **(_SPARSE.get(family, {}) | others),
    )
    if sees:
        tower = _TOWER | {"out_hidden_size": hidden} | fields.pop("vision_config", {})
        fields = {"text_config": fields, "vision_config": tower, "tie_word_embeddings": tied, **IMAGE_TOKENS}
    config = make_config(**fields)
    config.dtype = getattr(torch, dtype)
    model = make_model(config)
    _randomize(model, seed)
    directory = Path(directory)
    model.to(config.dtype).save_pretrained(directory)
    if family == "deepseek_v3":  # published ones say so, and vLLM asks for it; transformers doesn't write it
        file = directory / "config.json"
        config = json.loads(file.read_text()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        config["num_nextn_predict_layers"] = 0  # none was made
        file.write_text(json.dumps(config, indent=2) + "\n")
    if sees:
        write_processor(directory)
    if tokenizer is not None:
        for file in Path(tokenizer).iterdir():
            if file.name.startswith("tokenizer") or file.name in ("special_tokens_map.json", "chat_template.jinja"):
                shutil.copy(file, directory)
    return directory


def write_processor(directory: Path, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 64) -> None:
    """The settings of images, as published models have them: other limits of the pixels."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _randomize(model, seed: int) -> None:
    """Weights of a size at which logits differ clearly between tokens and between positions."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if "e_score_correction_bias" in name:  # it decides between experts, and most of all when they are close
                bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (1.0 if "norm" in name or "ln_q" in name else 0.0))
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.08 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
