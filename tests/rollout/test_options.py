"""The share of a device that vLLM is told to count on."""

import json
from types import SimpleNamespace

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.errors import ConfigError
from spmd_rl.platforms import record
from spmd_rl.rollout.options import REST_BYTES, memory_of_engine, model_options, switches

GIB = 2**30


def test_vllm_finds_as_much_free_as_it_was_told():
    # It refuses to start where less than its share is free; 0.92 is its own default.
    assert memory_of_engine(139 * GIB, 140 * GIB, 15 * GIB, 8 * GIB) == (0.92, 8 * GIB)
    for free in (30, 60, 79):
        share, _ = memory_of_engine(free * GIB, 80 * GIB, 15 * GIB, 8 * GIB)
        assert 0.9 * free < share * 80 < free


def test_an_engine_that_does_not_fit_is_refused_with_its_bytes_and_the_way_out():
    with pytest.raises(ConfigError, match=r"rollout.cache_gib = 8.00: .*15.00 GiB.*20.00 of the device's 80.00 GiB"):
        memory_of_engine(20 * GIB, 80 * GIB, 15 * GIB, 8 * GIB)


def test_a_cache_that_nobody_sized_is_what_weights_and_all_else_leave():
    assert memory_of_engine(60 * GIB, 64 * GIB, 15 * GIB, None)[1] == 45 * GIB - REST_BYTES
    with pytest.raises(ConfigError, match=r"rollout.cache_gib: .*15.00 GiB.*4.00 GiB are left for all else"):
        memory_of_engine(19 * GIB, 64 * GIB, 15 * GIB, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"enable_prefix_caching": True}),
        (
            "--rollout.prefix_caching false --rollout.max_batched_tokens 4096 --rollout.eager true",
            {"enable_prefix_caching": False, "max_num_batched_tokens": 4096, "enforce_eager": True},
        ),
    ],
)
def test_what_the_settings_turn_is_what_vllm_is_given(words, expected):
    config = load_config(["--model.path", "m", *words.split()])
    assert switches(config.rollout, record("cpu")) == expected


def test_graphs_are_refused_where_there_are_none():
    config = load_config(["--model.path", "m", "--rollout.eager", "false"])
    assert switches(config.rollout, record("cuda"))["enforce_eager"] is False
    with pytest.raises(ConfigError, match=r"rollout.eager = False: on such a machine the engine has no graphs"):
        switches(config.rollout, record("cpu"))


def test_vllm_is_told_that_nothing_is_quantized_where_the_directory_is(tmp_path):
    shape = SimpleNamespace(mla=None, head_dim=64)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for config, expected in (({}, None), ({"quantization_config": said}, {"quantization_config": None})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for platform in ("cpu", "cuda", "npu"):
            assert model_options(str(tmp_path), shape, 32, record(platform)).get("hf_overrides") == expected
