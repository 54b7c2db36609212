"""The operators of torch_npu that the program calls, computed by torch and held to what their vendor documents."""

import torch
from platforms.toy_machine import masked_softmax


def npu_fusion_attention(
    query, key, value, head_num, input_layout, *, atten_mask, scale, actual_seq_qlen, actual_seq_kvlen, sparse_mode
):
    assert head_num == query.shape[1] and input_layout == "TND" and sparse_mode == 3
    assert query.dtype == key.dtype == value.dtype and key.shape == value.shape and query.shape[-1] == key.shape[-1]
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))  # True is masked
    for ends, tokens in ((actual_seq_qlen, query), (actual_seq_kvlen, key)):
        assert type(ends) is list and 0 < len(ends) <= 1000 and ends[0] > 0 and ends[-1] == len(tokens)
    return masked_softmax(query, key, value, actual_seq_qlen, actual_seq_kvlen, scale), None, None


def npu_rms_norm(input, gamma, epsilon=1e-6):
    return torch.nn.functional.rms_norm(input, (input.shape[-1],), gamma, epsilon), None


def npu_rotary_mul(x, cosines, sines):
    assert x.dim() in (3, 4) and x.shape[-1] % 2 == 0 and x.shape[-1] < 896
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def npu_swiglu(x, dim=-1):
    assert x.numel() and x.is_contiguous() and dim == -1
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    assert len(x) == len(weight) == 1 and group_list_type == 1 and (split_item, group_type) in ((2, 0), (3, 2))
    assert group_list.dtype == torch.int64 and len(group_list) <= 1024 and len(x[0]) and x[0].dtype == weight[0].dtype
    counts = group_list.tolist()
    if group_type == 0:
        return [torch.cat([part @ own for part, own in zip(x[0].split(counts), weight[0], strict=True)])]
    both = zip(x[0].split(counts, dim=1), weight[0].split(counts), counts, strict=True)
    # What an expert without tokens has is not documented.
    return [torch.stack([part @ own if count else torch.full_like(part @ own, 7.0) for part, own, count in both])]
