"""The size of an engine's key-value cache, and what is said of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.config.engine_cache import GIB, REST_BYTES, CacheNeed, cache_room, token_bytes
from spmd_rl.config.loading import load_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.shipped import model_sizes
from spmd_rl.models.model_shape import read_model_shape

CONFIGS = Path(__file__).parents[2] / "configs"


def need(name, world, *words):
    config = with_machine_sizes(load_config(["--config", str(CONFIGS / f"{name}.yaml"), *words]), "npu")
    return CacheNeed.of(config, read_model_shape(model_sizes(config.model.path)), world)


@pytest.mark.parametrize(
    "model, tensor, size",
    [
        ("Qwen2.5-7B", 1, 57344),
        ("Qwen2.5-7B", 4, 14336),
        ("Qwen2.5-32B", 2, 131072),
        ("Qwen2.5-32B", 8, 32768),
        ("Qwen3-8B", 1, 147456),
        ("DeepSeek-R1-BF16", 2, 70272),
        ("Qwen2.5-VL-3B-Instruct", 1, 36864),
        ("Qwen2.5-7B", 8, 14336),  # fewer heads than ranks: each rank has one
    ],
)
def test_a_token_takes_what_its_keys_and_values_do(model, tensor, size):
    assert token_bytes(read_model_shape(model_sizes(model)), tensor, "bfloat16") == size


def test_it_is_said_how_many_samples_fit_and_where_an_engine_would_wait():
    one = need("grpo_qwen25_7b_a3", 16)
    assert (one.of_replica, one.at_once, one.longest) == (16, 256, 4096)
    assert one.described(4 * GIB) == (
        "key-value cache: 4.00 GiB a rank, room for 18 samples of 4096 tokens at once; an engine makes 16 in a step"
    )
    few = one.described(1 * GIB)
    assert "room for 4 samples of 4096 tokens at once, fewer than the 16 that an engine could run of its 16" in few
    assert "3.50 GiB would hold them (rollout.cache_gib, rollout.memory_fraction)" in few


def test_no_more_is_taken_than_all_samples_that_run_at_once_need():
    one = need("grpo_qwen25_7b_a3", 16, "--rollout.max_sequences", "16", "--rollout.block_tokens", "100")
    assert one.sample_bytes == 4100 * 57344
    assert 16 * one.sample_bytes < one.useful_bytes < 16.5 * one.sample_bytes


def test_the_room_is_a_part_of_the_device_beside_the_weights_or_of_the_machine():
    assert cache_room(60 * GIB, 64 * GIB, 15 * GIB, None, 8) == (60 - 15) * GIB - REST_BYTES
    assert cache_room(60 * GIB, 64 * GIB, 15 * GIB, 0.5, 8) == (32 - 15) * GIB
    assert cache_room(16 * GIB, None, 15 * GIB, None, 2) == pytest.approx(1.6 * GIB)
    assert cache_room(16 * GIB, None, 15 * GIB, 0.5, 2) == 4 * GIB


def test_a_microbatch_that_was_not_set_holds_the_longest_sample():
    words = ["--model.path", "m", "--run.platform", "cpu", "--data.max_prompt_length", "2048"]

    def tokens(response, *more):
        config = load_config([*words, "--rollout.max_response_length", response, *more])
        return with_machine_sizes(config).train.tokens_per_microbatch

    assert (tokens("8192"), tokens("100")) == (10240, 4096)
    assert tokens("20000", "--run.platform", "npu") == 22048
    assert tokens("100", "--train.tokens_per_microbatch", "2200") == 2200


def test_two_sizes_for_one_cache_are_refused(tmp_path):
    from spmd_rl.config.check_model import engine_problems

    config = load_config(["--model.path", "m", "--rollout.cache_gib", "1", "--rollout.memory_fraction", "0.5"])
    shape = read_model_shape(model_sizes("Qwen2.5-7B"))
    (problem,) = engine_problems(config.rollout, 1, "rollout.tensor", shape, "bfloat16", 100, 1)
    assert str(problem) == "rollout.cache_gib = 1.0: rollout.memory_fraction = 0.5 says it too; leave one of them out"


def test_all_ranks_take_the_same_and_no_room_for_a_sample_is_refused(monkeypatch):
    from spmd_rl.errors import ConfigError
    from spmd_rl.worker import cache_size

    config = load_config(["--model.path", "m", "--rollout.memory_fraction", "0.5"])
    one, world = need("grpo_qwen25_7b_a3", 16), SimpleNamespace(payload=None, ranks_per_node=2)
    device = SimpleNamespace(free_and_total_bytes=lambda: (60 * GIB, 64 * GIB))
    monkeypatch.setattr(cache_size, "gather", lambda room, group: [room, room - GIB])
    assert cache_size.cache_bytes(config, one, device, world, 15 * GIB) == 16 * GIB
    with pytest.raises(ConfigError, match=r"rollout.memory_fraction = 0.5: one sample of 4096 tokens takes 0.219 GiB"):
        cache_size.cache_bytes(config, one, device, world, 31 * GIB)
    host = SimpleNamespace(free_and_total_bytes=None)
    monkeypatch.setattr(cache_size, "free_host_bytes", lambda: 5 * GIB)
    with pytest.raises(ConfigError, match="5.00 GiB of the machine's memory are free"):
        config = load_config(["--model.path", "m"])
        cache_size.cache_bytes(config, need("grpo_qwen3_8b_a3", 16), host, world, 0)
