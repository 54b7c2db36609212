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
