"""config.json to a ModelShape."""

import json
from pathlib import Path

import pytest

from spmd_rl.config.config import ConfigError
from spmd_rl.config.model_shape import read_model_shape

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
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, change, said):
    assert said in refusal(write(tmp_path, QWEN3 | change))


def test_a_missing_directory_file_or_key_and_broken_json_say_so(tmp_path):
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
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
