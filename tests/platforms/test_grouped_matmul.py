"""The products of experts on every platform: a plain product for each, whoever has tokens and who has none."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fake_npu.operators import npu_grouped_matmul, npu_swiglu
from spmd_rl.patches import megatron_passes
from spmd_rl.platforms import npu
from spmd_rl.platforms.cpu import CPU
from spmd_rl.platforms.cuda import CUDA
from spmd_rl.platforms.grouped_matmul import ExpertCounts
from spmd_rl.platforms.npu import NPU
from tests.platforms.test_attention import vendors_operators

COUNTS = [[5, 0, 3, 1], [0, 0, 0, 7], [4], [0, 2, 0], [0, 0]]


@pytest.fixture(params=["ours", "vendor's"])
def torch_npu(request, monkeypatch):
    module = SimpleNamespace(npu_grouped_matmul=npu_grouped_matmul, npu_swiglu=npu_swiglu)
    if request.param == "vendor's":
        module = vendors_operators()
    monkeypatch.setitem(sys.modules, "torch_npu", module)


def check(matmul, counts, dtype=torch.float32, most=1e-5, inner=16, outer=24):
    """The platform's values and both gradients against a product for each expert."""
    x = torch.randn(sum(counts), inner, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), outer, inner, dtype=dtype, requires_grad=True)
    found = matmul(x, weight, ExpertCounts(torch.tensor(counts)))
    wanted = torch.cat([part.float() @ own.float().T for part, own in zip(x.split(counts), weight, strict=True)])
    assert found.dtype == dtype and found.shape == wanted.shape
    toward = torch.randn_like(wanted)
    mine = (found, *torch.autograd.grad(found, (x, weight), toward.to(dtype)))
    theirs = (wanted, *torch.autograd.grad(wanted, (x, weight), toward))
    for one, other in zip(mine, theirs, strict=True):
        # Of the largest: what nearly cancels out is rounded as much.
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.float(), other.float(), atol=most * max(1.0, largest), rtol=0.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_a_host_multiplies_expert_by_expert(counts):
    check(CPU.grouped_matmul, counts)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_takes_one_kernel_where_it_has_one(counts, dtype):
    check(CUDA.grouped_matmul, counts, dtype, 1e-5 if dtype == torch.float32 else 2e-2)
    # Rows of 18 bytes: no kernel.
    check(CUDA.grouped_matmul, counts, dtype, 1e-5 if dtype == torch.float32 else 2e-2, inner=9)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_npu_is_asked_as_its_vendor_documents_it(torch_npu, counts, dtype):
    check(NPU.grouped_matmul, counts, dtype, 1e-5 if dtype == torch.float32 else 2e-2)


def test_more_experts_than_the_npus_product_takes_go_one_by_one(torch_npu, monkeypatch):
    monkeypatch.setattr(npu, "_GROUPS", 3)
    monkeypatch.setattr(sys.modules["torch_npu"], "npu_grouped_matmul", None)
    check(NPU.grouped_matmul, [2, 0, 1, 3])


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("platform", [CPU, NPU], ids=lambda platform: platform.name)
def test_the_gate_of_experts_is_weighed(torch_npu, platform, tokens):
    x = torch.randn(tokens, 12, requires_grad=True)
    probs = torch.rand(tokens, requires_grad=True)
    gate, up = x.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up * probs[:, None]
    found = platform.weighted_swiglu(x, probs)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (x, probs)), torch.autograd.grad(wanted.sum(), (x, probs)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("platform", [CPU, NPU], ids=lambda platform: platform.name)
def test_the_gate_of_a_dense_layer_is_the_platforms(torch_npu, monkeypatch, platform, tokens, dtype, most):
    monkeypatch.setattr(megatron_passes, "current", lambda: platform)
    [patch] = [one for one in megatron_passes.PATCHES if one.attribute == "bias_swiglu_impl"]
    assert all(map(patch.meets, ("cpu", "cuda", "npu"))) and CUDA.swiglu is CPU.swiglu
    whole = torch.randn(tokens, 1, 30, dtype=dtype)
    x = whole[..., :24].requires_grad_()  # not contiguous, which the NPU's kernel does not take
    plain = x.detach().float().requires_grad_()
    gate, up = plain.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    found = patch.make(None)(x, None, False, False)
    assert found.dtype == dtype
    toward = torch.randn_like(wanted)
    mine = torch.autograd.grad(found, x, toward.to(dtype))[0]
    (theirs,) = torch.autograd.grad(wanted, plain, toward)
    for one, other in ((found, wanted), (mine, theirs)):
        torch.testing.assert_close(one.float(), other, atol=most, rtol=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_gate_that_computes_again_has_the_bits_of_autograd(dtype, weights):
    x = torch.randn(7, 24, dtype=dtype, requires_grad=True)
    probs = torch.rand(7, dtype=weights, requires_grad=True)
    gate, up = x.chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * (up + 0.0)  # as Megatron-Core has it
    weighed = (inner * probs[:, None]).to(dtype)
    toward = torch.randn(7, 12, dtype=dtype)
    for mine, theirs, inputs in (
        (CPU.swiglu(x), inner, [x]),
        (CPU.weighted_swiglu(x, probs), weighed, [x, probs]),
    ):
        both = [(one, *torch.autograd.grad(one, inputs, toward, retain_graph=True)) for one in (mine, theirs)]
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("platform", [CPU, CUDA, NPU], ids=lambda platform: platform.name)
def test_plan_counts_what_a_gate_keeps(monkeypatch, platform):
    # The vendor's kernel has its gradient from its input: npu_swiglu_backward(grad, x, dim).
    kernel = SimpleNamespace(npu_swiglu=lambda x, dim: checkpoint(npu_swiglu, x, use_reentrant=True))
    monkeypatch.setitem(sys.modules, "torch_npu", kernel)
    tokens, channels = 5, 12
    weight = torch.randn(channels, channels, requires_grad=True)

    def kept(gate, *inputs):
        """Elements that are held for the backward pass of a gate and the product behind it, but for the weight."""
        found = {}

        def pack(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            inputs = [one * 1.0 for one in inputs]  # made by another operation, as fc1's output is
            out = gate(*inputs) @ weight
        assert out.requires_grad
        return sum(found.values()) - weight.numel()

    x = torch.randn(tokens, 2 * channels, requires_grad=True)
    assert kept(platform.swiglu, x) == tokens * channels * 3
    probs = torch.rand(tokens, requires_grad=True)
    weighed = 3 + platform.kernels.weighed_copies
    assert kept(platform.weighted_swiglu, x, probs) == tokens * channels * weighed + tokens


def test_the_host_is_asked_for_counts_once():
    counts = ExpertCounts(torch.tensor([1, 2]))
    assert counts.on_host is counts.on_host == [1, 2]
    assert ExpertCounts(torch.tensor([1, 2]), [3, 4]).on_host == [3, 4]
