"""Patches: applied where they say, refused outside their versions, without effect on anybody else in the process."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spmd_rl.patches import megatron_core, torch_gloo, unread, vllm
from spmd_rl.patches.patch import Patch, apply_all, unmet_versions
from spmd_rl.patches.transformers_lists import keep_all, list_on_demand
from spmd_rl.patches.unused_imports import NO_COMPILER, UNUSED, left_out, standing_in, unused

ALL = megatron_core.PATCHES + vllm.PATCHES + torch_gloo.PATCHES


def test_every_installed_version_is_in_the_range_of_its_patches():
    assert unmet_versions([patch for patch in ALL if "cpu" in patch.platforms]) == []


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.target)
def test_every_record_says_why_where_and_until_when(patch):
    assert len(patch.reason) > 20 and patch.upstream.startswith("https://") and len(patch.until) > 20
    assert set(patch.platforms) <= {"cpu", "cuda", "npu"}
    assert ":" in patch.target


def test_another_version_is_refused_with_the_reason_and_the_way_out():
    moved_on = dataclasses.replace(megatron_core.PATCHES[0], versions=">=99")
    with pytest.raises(ValueError) as refused:
        apply_all([moved_on], "cpu")
    text = str(refused.value)
    assert "megatron-core 0.16" in text and ">=99" in text
    assert moved_on.reason in text and "setup_env.sh" in text and moved_on.until in text


def test_a_package_that_is_not_installed_is_named():
    absent = dataclasses.replace(megatron_core.PATCHES[0], package="no-such-package")
    assert unmet_versions([absent]) == [
        "no-such-package is not installed; bash launch/setup_env.sh installs it",
    ]


def test_patches_of_other_platforms_are_not_applied():
    broken = Patch("no-such-package", ">=1", "json:dumps", ("npu",), "r", "u", "t", make=lambda original: None)
    assert apply_all([broken], "cpu") == []


@pytest.mark.parametrize(("platform", "own"), [("cpu", "torch."), ("npu", "torch.npu.")])
def test_megatrons_optimizers_see_the_types_that_they_compare_with(platform, own):
    """They refuse all but torch.cuda.FloatTensor and the like, by name."""
    asked = []

    def original(tensor, dtype=None):
        asked.append(dtype)
        return f"{own}FloatTensor" if dtype is None else dtype

    [patch] = [one for one in megatron_core.PATCHES if one.attribute == "Tensor.type" and one.meets(platform)]
    tensor_type = patch.make(original)
    assert tensor_type(None) == "torch.cuda.FloatTensor"
    assert tensor_type(None, "torch.cuda.HalfTensor") == f"{own}HalfTensor"
    assert tensor_type(None, int) is int and asked[-1] is int


def test_no_machine_has_a_library_changed_twice_in_one_place():
    for platform in ("cpu", "cuda", "npu"):
        targets = [one.target for one in ALL if one.meets(platform)]
        assert len(targets) == len(set(targets)), platform


def test_collectives_are_sent_one_by_one_where_a_variable_says_so(monkeypatch):
    [patch] = [one for one in megatron_core.PATCHES if one.attribute == "_coalescing_manager"]
    coalesced = object()
    assert patch.make(coalesced) is coalesced
    monkeypatch.setenv(megatron_core.COALESCE, "0")
    manager = patch.make(coalesced)
    with manager("a group", async_ops=False) as handle:  # which would be waited for, and each of them was
        assert handle is None
    with pytest.raises(AssertionError, match="SPMD_RL_COALESCE = 0"), manager("a group", async_ops=True):
        pass


PROBE = """
import sys
sys.path[:0] = {paths!r}
import torch
real_empty, real_available = torch.empty, torch.cuda.is_available
from spmd_rl.patches import megatron_core
from spmd_rl.patches.patch import apply_all
lines = apply_all(megatron_core.PATCHES, "cpu")
assert len(lines) == sum(patch.meets("cpu") for patch in megatron_core.PATCHES), lines
import megatron.core.tensor_parallel.layers as layers
import megatron.core.fusions.fused_bias_swiglu as fused
# Megatron sees a host, everybody else sees torch
assert layers.torch is not torch and layers.torch.cuda.current_device() == torch.device("cpu")
assert torch.empty is real_empty and torch.cuda.is_available is real_available
assert layers.torch.empty(2, device="cuda").device.type == "cpu"
# a module that is imported later is patched too
import megatron.core.models.gpt.gpt_model as gpt
assert gpt.torch is layers.torch
assert not type(fused.swiglu).__name__.startswith("OptimizedModule"), type(fused.swiglu)
# with torch.device("meta") still reaches torch's own factories: a wrapped one gives transformers garbage rotary tables
with torch.device("meta"):
    assert torch.empty(3).is_meta and torch.arange(4).is_meta
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
with torch.no_grad():
    print("LOGITS", model(torch.arange(3, 20)[None]).logits.double().abs().sum().item())
"""


@pytest.mark.spmd
def test_megatron_sees_a_host_and_transformers_sees_nothing_of_it(tiny_models):
    import torch
    from transformers import AutoModelForCausalLM

    from spmd.ranks import ROOT

    probe = PROBE.format(paths=[str(ROOT)], model=tiny_models["llama"])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = float(done.stdout.split("LOGITS")[1])
    model = AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.arange(3, 20)[None]).logits.double().abs().sum().item()
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_many_tensors_is_theirs_without_waiting_for_each():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    [patch] = [one for one in megatron_core.PATCHES if one.attribute == "local_multi_tensor_l2_norm"]
    assert patch.meets("npu") and patch.meets("cuda") and not patch.meets("cpu")
    tensors = [torch.arange(1.0 + n) for n in range(9)]
    with Waits() as waits:
        norm, per_tensor = patch.make(None)(65536, None, [tensors], False)
    assert waits.count == 0 and per_tensor is None and norm.shape == (1,)
    assert norm.item() == pytest.approx(torch.cat(tensors).norm().item())


@pytest.mark.parametrize(("platform", "package", "installed"), [("npu", "vllm", "0.23.0"), ("cuda", "vllm", "0.32.1")])
def test_a_second_group_of_engines_counts_its_ranks_from_its_own_first(monkeypatch, platform, package, installed):
    from packaging.specifiers import SpecifierSet

    [patch] = [one for one in vllm.PATCHES if one.make is vllm.rank_within_group and one.meets(platform)]
    assert patch.package == package and SpecifierSet(patch.versions).contains(installed)
    asked = []

    class Group:
        distributed_executor_backend = "external_launcher"
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size = 2, 1, 4

    monkeypatch.setenv("RANK", "13")
    patch.make(lambda self: asked.append(os.environ["RANK"]))(Group())
    assert asked == ["5"] and os.environ["RANK"] == "13"


def test_an_engine_that_does_not_heed_the_size_of_its_cache_is_refused(monkeypatch):
    # vllm-ascend 0.18 never reads kv_cache_memory_bytes: its cache would take what is left of the device.
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.0")
    [patch] = [one for one in vllm.PATCHES if one.make is vllm.rank_within_group and one.meets("npu")]
    [problem] = unmet_versions([patch])
    assert "vllm 0.18.0" in problem and patch.versions in problem


def test_an_engines_weights_are_not_filled_before_the_first_refresh_but_its_buffers_are():
    import torch

    [patch] = [one for one in vllm.PATCHES if one.make is vllm.fill_buffers_alone and one.meets("cpu")]
    filled: list[int] = []
    fill = patch.make(lambda tensor: filled.append(id(tensor)))
    weight, scale, buffer = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1)), torch.ones(3)
    scale.dummy_weight_value = 0.5
    for tensor in (weight, scale, buffer):
        fill(tensor)
    assert filled == [id(scale), id(buffer)]


def test_memory_that_is_written_before_it_is_read_is_not_filled_and_only_inside_the_patched_function():
    import torch

    names = {"torch": torch}
    exec("def allocate(n):\n    return torch.zeros(n), torch.ones(n)", names)
    asked: list[int] = []
    names["torch"] = SimpleNamespace(empty=lambda n: asked.append(n) or torch.full((n,), 7.0), ones=torch.ones)
    known = names["torch"]
    made, ones = unread.allocate_unfilled(names["allocate"])(3)
    assert asked == [3] and made.tolist() == [7.0] * 3 and ones.tolist() == [1.0] * 3
    assert names["torch"] is known


def test_a_buffer_of_weights_is_zero_between_them_though_it_is_not_filled(monkeypatch):
    import torch

    monkeypatch.setitem(globals(), "torch", torch)  # as the library's module has it

    class Buffer:
        def __init__(self, ddp_config, param_dtype, grad_dtype, params, param_data):
            ends = [(1, 3, 0), (4, 6, 0)]
            self.param_index_map, self.param_data = dict(zip(params, reversed(ends), strict=True)), param_data
            for start, end, _ in ends:
                param_data[start:end] = 1.0

    make = unread.allocate_buffers_unfilled(Buffer.__init__)
    buffer = Buffer.__new__(Buffer)
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 1))]
    make(buffer, None, torch.float32, torch.float32, weights, torch.full((8,), torch.nan))
    assert [one.untyped_storage().nbytes() for one in weights] == [4, 4]  # their own memory is gone
    assert buffer.param_data.tolist() == [0, 1, 1, 0, 1, 1, 0, 0]


def test_a_tokens_rank_in_the_vocabulary_is_not_counted():
    import torch

    count = unread.count_no_ranks(None)(torch.zeros(3, 9), torch.zeros(3, 1))
    assert count.dtype == torch.int64 and count.tolist() == [0, 0, 0]


def test_what_needs_a_compiler_is_imported_where_torch_compiles(monkeypatch):
    monkeypatch.delenv(NO_COMPILER, raising=False)
    assert unused() == UNUSED
    monkeypatch.setenv(NO_COMPILER, "1")
    assert set(unused()) > set(UNUSED)


def test_a_library_that_is_left_out_cannot_be_imported_inside_and_can_afterwards(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with left_out(("colorsys", "json")):
        import json

        assert json.loads("1") == 1
        with pytest.raises(ImportError):
            import colorsys
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_distributions_are_listed_where_a_package_has_another_name_and_then_as_they_are():
    import importlib.metadata

    reads = []

    def read():
        reads.append(1)
        return importlib.metadata.packages_distributions()

    listed, real = list_on_demand(read)(), importlib.metadata.packages_distributions()
    assert listed.get("torch") == real["torch"] and listed.get("safetensors") == real["safetensors"] and not reads
    assert listed.get("PIL") == real["PIL"] == ["pillow"] and listed.get("no_such_package", []) == []
    assert dict(listed.items()).keys() == real.keys() and len(reads) == 1


def test_what_is_read_of_a_package_is_read_once_however_many_parts_it_has():
    import functools

    calls = []

    @functools.lru_cache
    def read(part):
        calls.append(part)
        return {part: {"all"}}

    kept = keep_all(read)
    assert [kept(part) for part in range(500)] == [kept(part) for part in range(500)] == [read(p) for p in range(500)]
    assert len(calls) == 1000, "the original's own calls are the second half"


def test_a_stand_in_has_types_that_pydantic_takes_and_is_gone_behind_its_imports():
    from pydantic import TypeAdapter

    with standing_in(["no_server.types.chat", "json"]):
        from no_server.types.chat import Message, Part

        assert "no_server" not in sys.modules, "nothing of the package is imported"
        assert TypeAdapter(Part).validate_python({}) == {} and Part | Message | str and list[Part]
        import json

        assert json.loads("1") == 1, "what is imported already stays"
    assert "no_server.types.chat" not in sys.modules


def test_what_only_logs_is_called_where_it_is_logged(monkeypatch):
    import logging

    said = []
    log = unread.log_where_it_is_read(said.append)
    for level, known in ((logging.WARNING, []), (logging.INFO, ["options"])):
        monkeypatch.setattr(logging.getLogger("vllm"), "level", level)
        logging.getLogger("vllm").manager._clear_cache()
        log("options")
        assert said == known
