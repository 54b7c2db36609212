"""The attention of every platform: each sample sees its prompt and its own past, also where the prompt is shared."""

import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_npu.operators import npu_fusion_attention, npu_rms_norm, npu_rotary_mul
from spmd_rl.platforms import npu
from spmd_rl.platforms.attention_layout import AttentionLayout, QuerySequence
from spmd_rl.platforms.cpu import CPU
from spmd_rl.platforms.cuda import CUDA
from spmd_rl.platforms.npu import NPU
from tests.platforms.toy_machine import masked_softmax, prepare_attention

SHIM = Path(os.environ.get("SPMD_RL_NPU_SHIM", "nothing"))
"""A reference of torch_npu's operators on CPUs that holds their callers to the vendor's documentation."""
SCALE = 0.3
GROUPS = [(7, [5, 2, 9]), (4, []), (3, [0, 1]), (1, [6]), (12, [])]
"""Of each group: tokens of its prompt, and of the responses that share it."""


def layout_of(groups) -> AttentionLayout:
    """As training/packing.py lays groups out; a prompt without responses is a whole sequence."""
    sequences, cursor = [], 0
    for prompt, responses in groups:
        shared = slice(cursor, cursor + prompt)
        sequences.append(QuerySequence(shared.start, shared.stop))
        cursor = shared.stop
        for length in filter(None, responses):
            sequences.append(QuerySequence(cursor, cursor + length, shared))
            cursor += length
    return AttentionLayout(tuple(sequences), torch.device("cpu"))


def one_by_one(query, key, value, groups):
    """Return what each sample gets alone, from its own copy of the prompt."""
    out, cursor = [], 0
    for prompt, responses in groups:
        shared = list(range(cursor, cursor + prompt))
        cursor += prompt
        wholes = [(shared, shared)]
        for length in responses:
            wholes.append((shared + list(range(cursor, cursor + length)), range(cursor, cursor + length)))
            cursor += length
        for whole, own in wholes:
            if len(own):
                found = masked_softmax(query[whole], key[whole], value[whole], [len(whole)], [len(whole)], SCALE)
                out.append(found[-len(own) :])
    return torch.cat(out)


def tensors(tokens, heads, kv_heads, dtype=torch.float32):
    return [torch.randn(tokens, n, 16, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def check(prepare, groups, heads=4, kv_heads=2, dtype=torch.float32, most=2e-5):
    """The platform's values and gradients against those of each sample alone."""
    layout = layout_of(groups)
    inputs = tensors(layout.query_ends[-1], heads, kv_heads, dtype)
    wanted = one_by_one(*(part.float() for part in inputs), groups)
    found = prepare(layout)(*inputs, SCALE)
    assert found.shape == wanted.shape and found.dtype == dtype
    weights = torch.randn_like(wanted)
    for mine, theirs in zip(
        (found, *torch.autograd.grad(found, inputs, weights.to(dtype))),
        (wanted, *torch.autograd.grad(wanted, inputs, weights)),
        strict=True,
    ):
        assert float((mine.detach() - theirs.detach()).abs().max()) < most


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=4)), min_size=1, max_size=4),
    st.sampled_from([(4, 2), (4, 4), (6, 1)]),
)
def test_a_shared_prompt_gives_what_each_sample_gets_alone(groups, heads):
    check(prepare_attention, groups, *heads)
    check(CPU.attention, groups, *heads)


def test_a_gpu_without_flash_attention_for_a_dtype_takes_the_general_kernel():
    check(CUDA.attention, GROUPS)


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn, held to what it documents."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and int(cu_q[0]) == int(cu_k[0]) == 0
    lengths = [[end - start for start, end in pairwise(part.tolist())] for part in (cu_q, cu_k)]
    assert [max(part) for part in lengths] == [max_q, max_k]
    assert window_size == (-1, 0) and enable_gqa == (query.shape[1] != key.shape[1])
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    return masked_softmax(query, key, value, cu_q[1:].tolist(), cu_k[1:].tolist(), scale)


@pytest.mark.parametrize("groups", [GROUPS, [(5, []), (3, [])]])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flash_attention_on_gpus_is_called_as_torch_documents_it(monkeypatch, groups, kv_heads):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("spmd_rl.platforms.cuda._flash_is_missing", lambda: "")
    check(CUDA.attention, groups, 4, kv_heads, dtype=torch.bfloat16, most=0.1)


def vendors_operators():
    if not SHIM.is_file():
        pytest.skip("SPMD_RL_NPU_SHIM names no file with references of torch_npu's operators")
    sys.path.insert(0, str(SHIM.parent))
    try:
        spec = importlib.util.spec_from_file_location("npu_shim", SHIM)
        shim = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(shim)
    finally:
        sys.path.remove(str(SHIM.parent))
    return SimpleNamespace(**shim.REFERENCE)


def our_operators():
    return SimpleNamespace(
        npu_fusion_attention=npu_fusion_attention, npu_rms_norm=npu_rms_norm, npu_rotary_mul=npu_rotary_mul
    )


@pytest.fixture(params=[our_operators, vendors_operators])
def torch_npu(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", request.param())


@pytest.mark.parametrize("groups", [GROUPS, [(5, []), (3, [])]])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_fused_attention_of_npus_is_called_as_its_vendor_documents_it(torch_npu, groups, kv_heads):
    check(NPU.attention, groups, 4, kv_heads)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_fused_attention_of_npus_is_as_close_in_half_precision(torch_npu, kv_heads):
    check(NPU.attention, GROUPS, 4, kv_heads, dtype=torch.bfloat16, most=0.1)


def test_more_sequences_than_the_fused_attention_takes_go_in_several_calls(torch_npu, monkeypatch):
    check(NPU.attention, [(2, [1] * 1001)], 1, 1, most=2e-4)  # the prompt's gradients are sums over all of them
    monkeypatch.setattr(npu, "_SEQUENCES", 3)
    check(NPU.attention, GROUPS)
    check(NPU.attention, [(2, [1] * 7), (5, [])])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_norm_of_npus_is_torchs(torch_npu, dtype, most):
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((6, 1, 32), (32,))]
    plain = [one.detach().float().requires_grad_() for one in inputs]
    toward = torch.randn(6, 1, 32)
    found, wanted = NPU.rms_norm(*inputs, 1e-5), CPU.rms_norm(*plain, 1e-5)
    mine = (found, *torch.autograd.grad(found, inputs, toward.to(dtype)))
    theirs = (wanted, *torch.autograd.grad(wanted, plain, toward))
    for one, other in zip(mine, theirs, strict=True):
        largest = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.float(), other, atol=most * largest, rtol=0.0)


@pytest.mark.parametrize("width", [16, 896])
def test_npus_turn_queries_as_torch_does(torch_npu, monkeypatch, width):
    """From 896 values of a head on, without the kernel."""
    x, angles = torch.randn(5, 3, width, requires_grad=True), torch.randn(5, 1, width)
    table = torch.cat((angles.cos(), angles.sin()), -1).chunk(2, -1)
    found, wanted = NPU.rotate(x, *table), CPU.rotate(x, *table)
    assert torch.allclose(found, wanted, atol=1e-6) and found.shape == x.shape
    gradients = [torch.autograd.grad(one.sum(), x)[0] for one in (found, wanted)]
    assert torch.allclose(*gradients, atol=1e-5)


def test_the_causal_mask_of_npus_is_made_once_a_device(torch_npu):
    assert npu._causal_mask(torch.device("cpu")) is npu._causal_mask(torch.device("cpu"))
