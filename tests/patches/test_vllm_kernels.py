"""Kernels of a rollout on a CPU: they draw the tokens that vLLM's own would, and norm and gate as torch does."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def library():
    """Load vLLM's kernels for CPUs."""
    import vllm.model_executor.layers.layernorm  # noqa: F401

    return torch.ops._C


@pytest.mark.parametrize("vocabulary", [5, 64, 999, 49152])
def test_a_draw_has_the_bits_of_vllms_own(library, vocabulary):
    from spmd_rl.platforms.cpu_gumbel import drawn

    generator = torch.Generator().manual_seed(vocabulary)
    for spread in (0.0, 0.5, 3.0, 20.0, 1e30):
        logits = torch.randn(12, vocabulary, generator=generator) * spread
        logits[3, ::3] = -torch.inf  # what top-k and top-p leave out
        logits[4, :-1] = -torch.inf
        logits[5] = -torch.inf
        seeds = torch.randint(0, 2**31, (12,), generator=generator)
        assert torch.equal(drawn(logits, seeds), library.fused_gumbel_argmax(logits, seeds)), spread


def test_tokens_are_drawn_as_often_as_they_are_likely():
    from spmd_rl.platforms.cpu_gumbel import drawn

    logits = torch.full((200, 200), -3.0)  # more than one block
    logits[:, 7], logits[:, 150], logits[:, 199] = 3.0, 4.0, 2.0
    tokens = torch.cat([drawn(logits, torch.arange(200) + 200 * call) for call in range(100)])
    seen = torch.bincount(tokens, minlength=200) / len(tokens)
    assert (seen - logits[0].softmax(0)).abs().max() < 0.015  # four deviations of 20,000 draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_one_pass_is_the_norm(library, dtype):
    from spmd_rl.patches.vllm_kernels import norm_in_one_pass

    torch.manual_seed(0)
    for rows, width in ((1, 64), (5, 576), (33, 2048)):
        weight = torch.randn(width).to(dtype)
        norm = SimpleNamespace(
            weight=weight, pass_weight=True, pass_weight_add=True, variance_epsilon=1e-5, variance_size_override=None
        )
        x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
        forward = norm_in_one_pass(lambda *_: pytest.fail("the kernel fits"))
        near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        wanted = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5).to(dtype)
        torch.testing.assert_close(forward(norm, x), wanted, **near)
        total = x.double() + residual.double()
        normed, added = forward(norm, x.clone(), residual.clone())
        torch.testing.assert_close(added, total.to(dtype), **near)
        wanted = torch.nn.functional.rms_norm(total, (width,), weight.double(), 1e-5).to(dtype)
        torch.testing.assert_close(normed, wanted, **near)


@pytest.mark.parametrize("why", ["a slice", "without weights", "of a part", "another type"])
def test_what_the_kernel_does_not_take_is_normed_as_vllm_does(why):
    from spmd_rl.patches.vllm_kernels import norm_in_one_pass

    x, weight = torch.randn(4, 8), torch.ones(8)
    norm = SimpleNamespace(
        weight=weight.double() if why == "another type" else weight,
        pass_weight=why != "without weights",
        variance_epsilon=1e-5,
        variance_size_override=4 if why == "of a part" else None,
    )
    given = torch.randn(4, 16)[:, :8] if why == "a slice" else x
    assert norm_in_one_pass(lambda *_: why)(norm, given) == why


def test_a_gate_in_place_has_the_bits_of_the_gate():
    from spmd_rl.patches.vllm_kernels import gate_in_place

    x = torch.randn(7, 96)
    kept = x.clone()
    gated = gate_in_place(lambda _: pytest.fail("it is left")).__func__(x)
    assert torch.equal(gated, torch.nn.functional.silu(x[:, :48]) * x[:, 48:])
    assert torch.equal(x, kept)


APPLIED = """
from spmd_rl.patches import vllm
from spmd_rl.patches.patch import apply_all
from spmd_rl.patches.vllm_kernels import left_as_they_are
apply_all(vllm.PATCHES, "cpu")
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.activation import SiluAndMul
import torch
logits, seeds = torch.randn(3, 1000), torch.arange(3)
whole = torch.ops._C.fused_gumbel_argmax
sampler = TopKTopPSampler()
def drawn(logits):
    generators = {row: torch.Generator().manual_seed(row) for row in range(3)}
    return sampler.forward_cpu(logits, generators, None, None)
torch.manual_seed(0)
small, _ = drawn(logits)
assert torch.ops._C.fused_gumbel_argmax is not whole
drawn(torch.zeros(3, 1 << 19))  # from here on it is the compiled loop that draws
again, _ = drawn(logits)
assert torch.equal(again, small)
with left_as_they_are():
    theirs, _ = drawn(logits)
    assert torch.ops._C.fused_gumbel_argmax is whole
assert len(set(small.tolist())) == 3
assert RMSNorm.forward_native._spmd_rl_patch in vllm.PATCHES
assert SiluAndMul.forward_native(torch.ones(2, 6)).shape == (2, 3)
"""


def test_a_rank_uses_them():
    found = subprocess.run([sys.executable, "-c", APPLIED], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
