"""Parts of Megatron-Core's forward and backward passes in a form that an accelerator need not be waited for in."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import FunctionCtx

from spmd_rl.patches.patch import EVERYWHERE, MEGATRON_CORE, Patch
from spmd_rl.platforms import current

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_SOURCE = "https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core"


def turn_by_table(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Turn queries or keys by cosines and sines that are given, instead of angles."""

    def turn(
        x: torch.Tensor,
        table: torch.Tensor,
        config: "TransformerConfig",
        cu_seqlens: object = None,
        mscale: float = 1.0,
        **others: object,
    ) -> torch.Tensor:
        """x [T, heads, d]; table [T, 1, 2 * the turned part of d], see training/rotary.py."""
        cosines, sines = table.chunk(2, dim=-1)
        width = cosines.shape[-1]
        turned = x[..., :width]
        if config.multi_latent_attention:
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
        turned = current().rotate(turned, cosines, sines)
        return turned if x.shape[-1] == width else torch.cat((turned, x[..., width:]), dim=-1)

    return turn


class _Rows(torch.autograd.Function):
    """Rows of a weight [V, H]; their gradients are added where they belong, and not as a whole matrix beside it."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.summed = weight.shape, getattr(weight, "main_grad", None)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        summed = grad.new_zeros(ctx.shape) if ctx.summed is None else ctx.summed
        summed.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(summed.dtype))
        return (summed if ctx.summed is None else None), None


def embed_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Look token ids up in this rank's part of the vocabulary, without masks as indices."""
    from megatron.core.tensor_parallel import mappings  # its module is loaded when this is called

    def forward(self: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1:
            found = _Rows.apply(self.weight, ids)
        else:
            outside = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
            local = (ids - self.vocab_start_index).clamp(0, self.num_embeddings_per_partition - 1)
            found = _Rows.apply(self.weight, local).masked_fill(outside[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            return mappings.reduce_scatter_to_sequence_parallel_region(
                found.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return mappings.reduce_from_tensor_model_parallel_region(found, group=self.tp_group)

    return forward


def add_gradients(original: object) -> SimpleNamespace:
    """Stand in for APEX's module: the product of a layer adds the gradient of its weight to the buffer itself."""

    def add(x: torch.Tensor, gradient: torch.Tensor, summed: torch.Tensor) -> None:
        """x [T, in]; gradient [T, out]; summed [out, in], float32."""
        current().add_product(summed, gradient.T, x)

    return SimpleNamespace(wgrad_gemm_accum_fp32=add)


def gate_at_once(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gate a dense layer's channels by the platform's kernel."""

    def gate(x: torch.Tensor, bias: torch.Tensor | None, *options: bool) -> torch.Tensor:
        assert bias is None and not any(options), (
            "no family has biases here, and nothing is kept in float8 or offloaded"
        )
        return current().swiglu(x)

    return gate


PATCHES = (
    *(
        Patch(
            package="megatron-core",
            versions=MEGATRON_CORE,
            target=f"megatron.core.tensor_parallel.layers:{name}",
            platforms=("cpu",),
            reason="the gradient of a weight is made beside the buffer, and then added to it, where APEX's kernel for CUDA is "
            "missing",
            upstream=f"{_SOURCE}/tensor_parallel/layers.py#L44",
            until="gradient_accumulation_fusion asks for no kernel of APEX",
            make=make,
        )
        for name, make in (
            ("fused_weight_gradient_mlp_cuda", add_gradients),
            ("_grad_accum_fusion_available", lambda original: True),
        )
    ),
    *(
        Patch(
            package="megatron-core",
            versions=MEGATRON_CORE,
            target=f"megatron.core.transformer.{module}:apply_rotary_pos_emb",
            platforms=EVERYWHERE,
            reason="every layer computes cosines and sines of the same angles twice, and asks the device three times for "
            "the ends of the sequences",
            upstream=f"{_SOURCE}/models/common/embeddings/rope_utils.py#L204",
            until="attention takes cosines and sines of packed tokens, once a micro-batch",
            make=turn_by_table,
        )
        for module in ("attention", "multi_latent_attention")
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
        platforms=EVERYWHERE,
        reason="indices that are masks wait for the device, and the gradient of a few rows is a whole matrix of zeros, "
        "made and added to the gradients in each micro-batch",
        upstream=f"{_SOURCE}/tensor_parallel/layers.py#L268",
        until="the embedding adds its gradient to main_grad, and masks without indexing",
        make=embed_rows,
    ),
    Patch(
        package="megatron-core",
        versions=MEGATRON_CORE,
        target="megatron.core.transformer.mlp:bias_swiglu_impl",
        platforms=EVERYWHERE,
        reason="the gate of a dense layer is several elementwise passes, of which each leaves its result in memory",
        upstream=f"{_SOURCE}/transformer/mlp.py#L204",
        until="Megatron-Core takes a fused gate from the platform",
        make=gate_at_once,
    ),
)
