"""Stands for what sends tokens to experts, and the experts themselves, whose weights lie transposed."""

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.utils import replace_parameter


class TokenDispatcher:
    """Knows which experts are here: a plain tensor, which sleep mode loses."""

    def __init__(self, experts: torch.Tensor):
        self.expert_ids_per_ep_rank = experts


class CommMethod:
    """Holds its dispatcher."""

    def __init__(self, dispatcher: TokenDispatcher):
        self.token_dispatcher = dispatcher


_MoECommMethods: dict[str, CommMethod] = {}


def transpose_weights(self, layer: torch.nn.Module) -> None:
    """Keep [E, H, 2I] and [E, I, H], as grouped multiplication reads them."""
    for name in ("w13_weight", "w2_weight"):
        replace_parameter(layer, name, getattr(layer, name).transpose(1, 2).contiguous())
    here = len(layer.w13_weight)
    first = self.moe_config.moe_parallel_config.ep_rank * here if self.moe_config.num_experts > here else 0
    _MoECommMethods["alltoall"] = CommMethod(TokenDispatcher(torch.arange(first, first + here)))


def apply(
    self,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **others: object,
) -> None:
    """Compute each token's experts that are here."""
    assert w1.is_contiguous() and w2.is_contiguous() and w1.shape[1] == hidden_states.shape[1] == w2.shape[2]
    total = torch.zeros(output.shape)
    experts = _MoECommMethods["alltoall"].token_dispatcher.expert_ids_per_ep_rank
    for expert, (up, down) in zip(experts.tolist(), zip(w1, w2, strict=True), strict=True):
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, values = (hidden_states[token] @ up).chunk(2, -1)
        part = (torch.nn.functional.silu(gate) * values) @ down
        total.index_add_(0, token, (part * topk_weights[token, choice, None]).float())
    output.copy_(total)


CPUUnquantizedExperts.process_weights_after_loading = transpose_weights
CPUUnquantizedExperts.apply = apply
