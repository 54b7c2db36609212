"""config.json to a ModelShape."""

import json
import math
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.models.blocks import LatentAttention
from spmd_rl.models.model_shape import read_model_shape

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}


def write(tmp_path, content, generation=None):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_model_shape(path)
    assert f"model.path = {path}" in str(caught.value)
    return str(caught.value)


def test_a_qwen3_file_is_read(tmp_path):
    shape = read_model_shape(write(tmp_path, QWEN3, {"eos_token_id": [151645, 151643]}))
    assert (shape.family, shape.layers, shape.hidden, shape.heads, shape.kv_heads) == ("qwen3", 28, 1024, 16, 8)
    assert (shape.head_dim, shape.ffn, shape.vocabulary, shape.max_positions) == (128, 3072, 151936, 40960)
    assert (shape.tied, shape.qkv_bias, shape.qk_norm) == (True, False, True)
    assert (shape.rms_epsilon, shape.rope_theta, shape.rope_scaling) == (1e-6, 1e6, None)
    assert shape.eos_token_ids == (151645, 151643)


def test_the_old_and_the_new_spelling_of_rotary_settings_mean_the_same(tmp_path):
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    base = {key: value for key, value in QWEN3.items() if not key.startswith("rope")}
    base["architectures"] = ["LlamaForCausalLM"]
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
    ]
    shapes = [read_model_shape(write(tmp_path, base | spelling)) for spelling in spellings]
    assert shapes[0].rope_scaling == {"rope_type": "llama3", **scaling}
    assert shapes[0].rope_theta == 5e5
    assert shapes[0] == shapes[1] == shapes[2]


def test_default_rotary_settings_are_no_scaling(tmp_path):
    base = {key: value for key, value in QWEN3.items() if not key.startswith("rope")}
    shape = read_model_shape(write(tmp_path, base | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}))
    assert (shape.rope_theta, shape.rope_scaling) == (1e5, None)


def test_absent_values_are_what_the_family_assumes(tmp_path):
    content = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": None}
    for key in ("head_dim", "tie_word_embeddings"):
        del content[key]
    shape = read_model_shape(write(tmp_path, content))
    assert (shape.family, shape.head_dim, shape.tied, shape.qkv_bias) == ("qwen2", 64, False, True)
    assert shape.eos_token_ids == ()


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path):
    said = refusal(write(tmp_path, QWEN3 | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in said
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in said


@pytest.mark.parametrize(
    "change, said",
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_attention_heads": "many"}, "cannot be understood"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "scaled by longrope"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.2}}, "attention_factor"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, change, said):
    assert said in refusal(write(tmp_path, QWEN3 | change))


# As published, without what no layout depends on.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}


def test_deepseek_v3_is_read_as_published(tmp_path):
    shape = read_model_shape(write(tmp_path, DEEPSEEK_V3))
    assert shape.mla == LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert (shape.head_dim, shape.kv_heads) == (192, 128)
    experts = shape.experts
    assert (experts.count, experts.per_token, experts.ffn, experts.shared_ffn) == (256, 8, 2048, 2048)
    assert experts.sparse == (False,) * 3 + (True,) * 58
    assert (experts.groups, experts.groups_per_token, experts.scale) == (8, 4, 2.5)
    from spmd_rl.weights.families import hf_tensors

    parameters = sum(math.prod(size) for size in hf_tensors(shape).values())
    assert parameters / 1e9 == pytest.approx(671.0, abs=0.1)


def test_float8_with_a_scale_for_each_block_is_no_other_model(tmp_path):
    plain = read_model_shape(write(tmp_path, DEEPSEEK_V3))
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert read_model_shape(write(tmp_path, DEEPSEEK_V3 | {"quantization_config": blocks})) == plain


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "a copy in bfloat16",
        ),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 with topk_group = 4"),
        ({"norm_topk_prob": False}, "norm_topk_prob is off"),
        ({"scoring_func": "softmax"}, "scoring_func is softmax"),
        ({"topk_method": "greedy"}, "topk_method is greedy"),
        ({"rope_interleave": False}, "rope_interleave is off"),
    ],
)
def test_what_of_deepseek_would_be_computed_wrongly_is_refused(tmp_path, change, said):
    assert said in refusal(write(tmp_path, DEEPSEEK_V3 | change))


def test_which_layers_of_qwen_moe_are_sparse_follows_from_step_and_list(tmp_path):
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 6}
    content = QWEN3 | sparse | {"architectures": ["Qwen3MoeForCausalLM"]}
    assert read_model_shape(write(tmp_path, content)).experts.sparse == (True,) * 6
    some = content | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_model_shape(write(tmp_path, some)).experts.sparse == (False, True, False, False, False, True)
    shared = content | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 96}
    shape = read_model_shape(write(tmp_path, shared))
    assert (shape.experts.shared_ffn, shape.experts.shared_gate, shape.qkv_bias) == (96, True, True)


def test_a_model_with_a_score_head_has_labels_instead_of_a_vocabulary_to_predict(tmp_path):
    content = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "good"}}
    shape = read_model_shape(write(tmp_path, content))
    assert (shape.head, shape.labels, shape.tied) == ("value", 1, False)


def test_a_missing_directory_file_or_key_and_broken_json_say_so(tmp_path):
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("200")
    assert "a checkpoint of Megatron's old format (latest_checkpointed_iteration.txt)" in refusal(tmp_path / "theirs")
    assert "not valid JSON" in refusal(write(tmp_path, "{"))
    assert "holds list" in refusal(write(tmp_path, "[]"))
    content = dict(QWEN3)
    del content["hidden_size"]
    assert "has no 'hidden_size'" in refusal(write(tmp_path, content))


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_the_shape_of_a_saved_model_is_that_of_its_weights(tiny_models, name):
    from safetensors import safe_open

    directory = Path(tiny_models[name])
    shape = read_model_shape(directory)
    with safe_open(directory / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        size = {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    layer = "model.layers.1."
    assert size["model.embed_tokens.weight"] == (shape.vocabulary, shape.hidden)
    assert size[layer + "self_attn.q_proj.weight"] == (shape.heads * shape.head_dim, shape.hidden)
    assert size[layer + "self_attn.k_proj.weight"] == (shape.kv_heads * shape.head_dim, shape.hidden)
    assert size[layer + "mlp.up_proj.weight"] == (shape.ffn, shape.hidden)
    assert (layer + "self_attn.q_proj.bias" in names) == shape.qkv_bias
    assert (layer + "self_attn.q_norm.weight" in names) == shape.qk_norm
    assert ("lm_head.weight" not in names) == shape.tied
    assert f"model.layers.{shape.layers - 1}.input_layernorm.weight" in names
    assert f"model.layers.{shape.layers}.input_layernorm.weight" not in names
    assert name.startswith(shape.family)
