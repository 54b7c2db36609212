"""Sizes that the configuration leaves to the machine, and what it asks of one that repeats nothing by itself."""

import os

import pytest

from spmd_rl.config.config import Config, ModelConfig, RunConfig
from spmd_rl.config.loading import load_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.platforms import record


def sizes(*words, elsewhere=""):
    config = with_machine_sizes(load_config(["--model.path", "m", *words]), elsewhere)
    return config.rollout.max_sequences, config.train.tokens_per_microbatch, config.rollout.cache_gib


def test_sizes_suit_the_machine_where_none_are_named():
    assert sizes("--run.platform", "cpu") == (64, 4096, None)
    for machine in ("npu", "cuda"):
        assert sizes("--run.platform", machine) == (256, 16384, None)
    assert sizes(elsewhere="npu") == (256, 16384, None)
    named = ("--rollout.max_sequences", "7", "--train.tokens_per_microbatch", "9", "--rollout.cache_gib", "2")
    assert sizes("--run.platform", "npu", *named) == sizes("--run.platform", "cpu", *named) == (7, 9, 2.0)


@pytest.mark.parametrize(("name", "variable"), [("npu", "HCCL_DETERMINISTIC"), ("cuda", "CUBLAS_WORKSPACE_CONFIG")])
def test_libraries_are_asked_for_the_same_bits_only_where_the_run_asks(monkeypatch, name, variable):
    machine = record(name)
    for one in (*machine.environment, *machine.deterministic_environment):
        monkeypatch.delenv(one, raising=False)
        monkeypatch.setitem(os.environ, one, "")  # restored at the end
        del os.environ[one]
    machine.set_environment()
    assert variable not in os.environ and not machine.repeats_exactly
    machine.set_environment(deterministic=True)
    assert os.environ[variable] == machine.deterministic_environment[variable]


def test_torch_is_asked_too_where_the_machine_does_not_repeat_by_itself():
    import torch

    try:
        record("cpu").make_deterministic()
        assert not torch.are_deterministic_algorithms_enabled()
        record("npu").make_deterministic()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_repeats_nothing_on_purpose_unless_it_is_asked():
    assert Config(ModelConfig("m"), run=RunConfig()).run.deterministic is False
