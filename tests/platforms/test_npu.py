"""Test what the NPU's record computes before a device is touched."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.models.blocks import Experts
from spmd_rl.platforms import npu
from spmd_rl.platforms.npu import NPU


@dataclass
class Shape:
    """As much of a model's shape as is asked for."""

    hidden: int
    experts: Experts | None = None


def experts(count: int) -> Experts:
    return Experts(count, 8, 512, 0, False, (True,), "softmax", True, False, 1, 1, 1.0)


@pytest.mark.parametrize(
    ("hidden", "count", "expert", "sequences", "mebibytes"),
    [(7168, 256, 32, 16, 128), (7168, 256, 32, 32, 239), (7168, 256, 32, 64, 478), (2048, 128, 8, 128, 152)],
)
def test_hccls_buffers_hold_what_the_experts_kernels_send(hidden, count, expert, sequences, mebibytes):
    # The values of https://github.com/vllm-project/vllm-ascend/issues/5287 for DeepSeek-R1 and Qwen3-30B-A3B.
    found = NPU.model_environment(Shape(hidden, experts(count)), 1, expert, sequences)
    assert found == {"HCCL_BUFFSIZE": str(mebibytes)}


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "512")
    assert NPU.set_model_environment(Shape(2048, experts(128)), 1, 8, 256) == []
    assert os.environ["HCCL_BUFFSIZE"] == "512"
    monkeypatch.delenv("HCCL_BUFFSIZE")
    assert NPU.set_model_environment(Shape(2048), 1, 1, 256) == ["HCCL_BUFFSIZE = 128, by the model's sizes"]


def test_an_allocator_that_sleep_mode_refuses_is_refused_by_the_variables_name(monkeypatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match="PYTORCH_NPU_ALLOC_CONF = .*unset PYTORCH_NPU_ALLOC_CONF"):
        replace(NPU, environment={}, more_environment=dict).set_environment()


@pytest.mark.parametrize("value", ["1", "2"])
def test_a_layout_of_weights_that_no_refresh_writes_is_refused_by_the_variables_name(monkeypatch, value):
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", value)
    with pytest.raises(ConfigError, match=f"VLLM_ASCEND_ENABLE_NZ = {value}.*FRACTAL_NZ.*unset VLLM_ASCEND_ENABLE_NZ"):
        replace(NPU, environment={}, more_environment=dict).set_environment()
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    replace(NPU, environment={}, more_environment=dict).set_environment()


def test_a_login_node_with_the_wheel_is_no_npu(monkeypatch):
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(npu, "glob", lambda pattern: [])
    assert "/dev/davinci0" in NPU.missing()
    monkeypatch.setattr(npu, "glob", lambda pattern: ["/dev/davinci0"])
    assert NPU.missing() == ""


def test_custom_operators_are_known_before_the_device_is_touched(monkeypatch, tmp_path):
    vendor = tmp_path / "_cann_ops_custom" / "vendors" / "custom_transformer"
    vendor.mkdir(parents=True)

    class Found:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: Found())
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", "/mine")
    npu._custom_operators()
    npu._custom_operators()
    assert os.environ["ASCEND_CUSTOM_OPP_PATH"].split(":") == [str(vendor), "/mine"]
    assert Path(vendor).is_dir()


class Recorded:
    """Stands for a module: says what was called or looked up, in order."""

    def __init__(self, name, said, **known):
        self._name, self._said = name, said
        self.__dict__.update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self._said.append(name)
        return lambda *arguments: None


def test_a_die_is_touched_before_torch_cuda_means_it_and_after_its_operators_are_known(monkeypatch):
    import torch

    said: list[str] = []
    settings = SimpleNamespace(allow_internal_format=True)
    fake = Recorded("torch.npu", said, config=settings, default_generators=("a generator",))
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(npu, "_custom_operators", lambda: said.append("custom operators"))
    for name in ("torch_npu", "torch_npu.contrib"):
        monkeypatch.setitem(sys.modules, name, Recorded(name, said, __path__=[]))
    NPU.claim(3)
    # Megatron binds torch.cuda when it is imported, and CANN looks for operators when the die is touched.
    assert list(dict.fromkeys(said)) == ["custom operators", "set_device", "synchronize", "transfer_to_npu"]
    assert settings.allow_internal_format is False and torch.cuda.default_generators == ("a generator",)


def test_what_is_taken_of_a_die_is_what_its_driver_says(monkeypatch):
    import torch

    fake = SimpleNamespace(mem_get_info=lambda: (10, 64), max_memory_reserved=lambda: 30)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    assert NPU.memory_bytes() == 54 and NPU.peak_memory_bytes() == 54 and NPU.free_and_total_bytes() == (10, 64)
    fake.max_memory_reserved = lambda: 60
    assert NPU.peak_memory_bytes() == 60


def test_what_a_die_may_not_do_is_left_out():
    # A copy of a process has no CANN context, and the vendor does not promise that whole numbers wrap around.
    assert not NPU.forks and not NPU.wraps_integers and NPU.environment["VLLM_ASCEND_ENABLE_NZ"] == "0"
