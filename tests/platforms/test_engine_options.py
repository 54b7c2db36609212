"""Test what vLLM is told about a model, and which models it is not asked to run."""

import dataclasses
import json

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.platforms.cpu import CPU
from spmd_rl.platforms.cuda import CUDA
from spmd_rl.rollout.options import model_options

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "eos_token_id": 2,
}


@pytest.fixture
def shape_of(tmp_path):
    def read(**fields):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
        return read_model_shape(tmp_path)

    return read


def test_latent_attention_on_a_cpu_has_blocks_of_its_own_and_no_compiled_rotary_kernel(shape_of):
    options = model_options("m", shape_of(), 32, CPU)
    assert options["block_size"] == 16
    assert options["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert options["enforce_eager"] is True


@pytest.mark.parametrize("field", [{"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}])
def test_other_latents_are_refused_on_a_cpu_by_the_names_of_the_models_fields(shape_of, field):
    (name, value), shape = *field.items(), shape_of(**field)
    with pytest.raises(ValueError, match=rf"model.path = m: .*{name} = {value}.*kv_lora_rank = 512") as refused:
        model_options("m", shape, 32, CPU)
    assert "another platform" in str(refused.value)
    assert model_options("m", shape, 32, CUDA) == CUDA.engine_options


def test_other_models_on_a_cpu_have_the_blocks_that_were_asked_for(shape_of):
    shape = dataclasses.replace(shape_of(), mla=None)
    assert model_options("m", shape, 64, CPU)["block_size"] == 64


def test_experts_on_gpus_run_on_kernels_that_leave_weights_as_a_refresh_writes_them(shape_of):
    # FlashInfer's, which Blackwell gets by default, shuffle them.
    assert model_options("m", shape_of(), 32, CUDA) == {"enable_sleep_mode": True, "moe_backend": "triton"}


def test_torch_compiles_nothing_for_a_dense_model_on_a_cpu_and_still_routes_experts(shape_of):
    shape = shape_of()
    assert CPU.model_environment(shape, 1, 1, 48) == {}
    dense = dataclasses.replace(shape, experts=None, mla=None)
    assert CPU.model_environment(dense, 1, 1, 48) == {"TORCHDYNAMO_DISABLE": "1"}


def test_a_variable_that_would_size_the_cache_in_place_of_the_setting_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE = 1: .*set rollout.cache_gib"):
        dataclasses.replace(CPU, environment={}).set_environment()
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    dataclasses.replace(CPU, environment={}).set_environment()
