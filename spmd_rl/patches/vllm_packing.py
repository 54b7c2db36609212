"""vLLM's packed weights on a CPU: packed on demand from plain ones, which a refresh writes, and dropped again."""

from typing import Any

import torch


class PackedLinear:
    """A layer's multiplication: with a packed copy of its weight after `pack`, with the weight itself before."""

    names = ("weight",)

    def __init__(self) -> None:
        self._packed: Any = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        from vllm import _custom_ops as ops

        return ops.onednn_mm(self._packed, x, bias)

    def pack(self, name: str, weight: torch.Tensor) -> bool:
        """Copy the weight into the layout of the CPU's kernels, where there are such; whether that was done."""
        from vllm import _custom_ops as ops

        if not ops._supports_onednn:
            return False
        try:
            # vLLM's own choice of how many shapes a layer keeps kernels for.
            self._packed = ops.create_onednn_mm(weight.t(), 32)
        except RuntimeError:  # no kernel for this type: bfloat16 on a CPU without AVX-512; torch multiplies, as in vLLM
            return False
        return True

    def unpack(self, name: str) -> None:
        """Drop the packed copy."""
        self._packed = None


class PackedExperts:
    """The packed weights of a layer's experts; the kernels read nothing else."""

    names = ("w13_weight", "w2_weight")

    def __init__(self, isa: str, ffn: int, padded_ffn: int):
        """`ffn`: rows of an expert's gate on this rank; `padded_ffn`: what the kernels want to have of them."""
        self.isa, self.padding = isa, padded_ffn - ffn
        self._packed: dict[str, torch.Tensor] = {}

    def pack(self, name: str, weight: torch.Tensor) -> bool:
        """Copy one of the two weights into the layout of the kernels."""
        from vllm._custom_ops import cpu_prepack_moe_weight

        if self.padding and name == "w13_weight":
            # [experts, gate and up, H]: each half is padded by itself
            halves = weight.unflatten(1, (2, -1))
            weight = torch.nn.functional.pad(halves, (0, 0, 0, self.padding)).flatten(1, 2)
        elif self.padding:
            weight = torch.nn.functional.pad(weight, (0, self.padding))
        self._packed[name] = cpu_prepack_moe_weight(weight, self.isa)
        return True

    def unpack(self, name: str) -> None:
        """Drop the packed copy of one of the two."""
        self._packed.pop(name, None)

    def packed(self, name: str) -> torch.Tensor:
        """The weights as the kernels read them."""
        return self._packed[name]


Packed = PackedLinear | PackedExperts


def packed_of(layer: torch.nn.Module) -> Packed | None:
    """Return the packing of a layer's weights; None where they are used as they are."""
    for name in ("cpu_linear", "cpu_experts"):
        packed = getattr(layer, name, None)
        if isinstance(packed, Packed):
            return packed
    return None


def pack_linear_on_demand(original: Any) -> Any:
    """Linear layers keep the weight they were given until they are told that it is complete."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        # What is left is an embedding, which multiplies with its weight only where it is the output layer too.
        packs = remove_weight or isinstance(layer, ParallelLMHead)
        layer.cpu_linear = PackedLinear() if packs else torch.nn.functional.linear

    return dispatch


def pack_experts_on_demand(original: Any) -> Any:
    """Experts keep the weights they were given until they are told that these are complete."""

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        assert not hasattr(layer, "w13_bias"), "experts with biases are packed together with them"
        ffn, padded = self.moe_config.intermediate_size_per_partition, self._padded_intermediate_size(self.moe_config)
        self.cpu_experts = layer.cpu_experts = PackedExperts(self.isa, ffn, padded)

    return process_weights_after_loading


def apply_packed_local_experts(original: Any) -> Any:
    """Each token through those of its experts that are on this rank, and through no other."""

    def apply(
        self: Any,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **others: Any,
    ) -> None:
        others |= {
            "w1": self.cpu_experts.packed("w13_weight"),
            "w2": self.cpu_experts.packed("w2_weight"),
            "expert_map": None,
        }
        if expert_map is None:
            original(
                self,
                output=output,
                hidden_states=hidden_states,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                **others,
            )
            return
        local = expert_map[topk_ids.long()]
        token, choice = (local >= 0).nonzero(as_tuple=True)
        total = torch.zeros(output.shape, dtype=torch.float32)
        if len(token):
            # One row a pair of token and expert: no expert is computed for tokens that did not choose it.
            parts = output.new_empty(len(token), output.shape[1])
            original(
                self,
                output=parts,
                hidden_states=hidden_states[token],
                topk_weights=topk_weights[token, choice].unsqueeze(1),
                topk_ids=local[token, choice].unsqueeze(1).to(topk_ids.dtype),
                **others,
            )
            total.index_add_(0, token, parts.float())
        output.copy_(total)

    return apply
