"""A kernel that a machine, its torch or a model's sizes rule out: the run says which, and why, in a line."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from spmd_rl.platforms import cuda
from spmd_rl.platforms.cpu import CPU
from spmd_rl.platforms.cuda import CUDA
from spmd_rl.platforms.npu import NPU


def shape(head_dim=128, experts=None, mla=None, hidden=64):
    return SimpleNamespace(head_dim=head_dim, experts=experts, mla=mla, hidden=hidden)


EXPERTS = SimpleNamespace(count=8, ffn=32)
LATENT = SimpleNamespace(nope_dim=128, rope_dim=64)


@pytest.fixture
def gpu(monkeypatch):
    """Be a Hopper GPU; returns what makes it one of another capability."""

    def be(*capability):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *device: capability)
        cuda._flash_is_missing.cache_clear()
        cuda._has_kernels.cache_clear()

    be(9, 0)
    yield be
    cuda._flash_is_missing.cache_clear()
    cuda._has_kernels.cache_clear()


@pytest.mark.parametrize("platform", [CPU, CUDA, NPU], ids=lambda platform: platform.name)
@pytest.mark.parametrize("model", [shape(), shape(mla=LATENT, experts=EXPERTS)])
def test_where_every_kernel_runs_nothing_is_said(gpu, platform, model):
    assert platform.slower_paths(model, "bfloat16") == []


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        (shape(), "float32", ["attention goes through torch's general kernel, .*: it computes in half precision only"]),
        (shape(head_dim=320), "bfloat16", ["heads of up to 256 values, and these have 320"]),
        (shape(experts=EXPERTS), "float16", ["expert by expert, .*: it is for bfloat16"]),
        (shape(experts=SimpleNamespace(count=8, ffn=12)), "bfloat16", ["16 bytes, and these have 64 and 12 values"]),
    ],
)
def test_a_size_beyond_a_gpus_kernel_takes_another_way_and_is_named(gpu, model, dtype, said):
    lines = CUDA.slower_paths(model, dtype)
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert re.search(part, line), line


def test_an_older_gpu_or_torch_takes_another_way_and_is_named_with_its_version(gpu, monkeypatch):
    model = shape(experts=EXPERTS)
    gpu(7, 5)
    attention, experts = CUDA.slower_paths(model, "bfloat16")
    assert "needs compute capability 8.0, and this GPU has 7.5" in attention and "capability 8.0" in experts
    gpu(9, 0)
    # As it was before it took windows and grouped heads.
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda query, key, value, cu_q, cu_k, max_q, max_k, is_causal: None
    )
    monkeypatch.delattr(F, "grouped_mm")
    attention, experts = CUDA.slower_paths(model, "bfloat16")
    assert f"torch {torch.__version__} has no varlen_attn" in attention and "torch 2.12" in attention
    assert f"torch {torch.__version__} has no grouped_mm" in experts
    assert cuda._no_flash(2, 128)  # and that is what attention itself asks


def test_a_size_beyond_an_npus_kernel_takes_another_way_and_is_named():
    wide, many = shape(head_dim=896), shape(experts=SimpleNamespace(count=1025, ffn=32))
    assert ["less than 896 values" in line for line in NPU.slower_paths(wide, "bfloat16")] == [True]
    assert ["more than 1024" in line for line in NPU.slower_paths(many, "bfloat16")] == [True]
