"""Megatron's load-balancing loss of the experts, over the micro-batches of a mini-batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from spmd_rl.training.packing import Packed
from spmd_rl.training.parallel import Place

if TYPE_CHECKING:
    from spmd_rl.training.model import ModelChunks


class BalancingRouter(TopKRouter):
    """Megatron's router, in which a micro-batch's loss counts as often as it has tokens, in every layout."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **options)
        self.balance = torch.zeros((), dtype=torch.float32)
        """The losses so far, without their coefficient, each times the tokens of its micro-batch."""
        self._tokens = torch.zeros(())

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        if not with_padding_mask:  # a micro-batch without samples (see `mask_of`) has nothing to balance
            return probs
        # Megatron's count is of this rank or of all, as its reduction happens in place or not.
        self._tokens = reduce_from_tensor_model_parallel_region(chosen.sum() / self.topk, self.tp_cp_group)
        return super()._apply_aux_loss(probs, scores, chosen, with_padding_mask=True)

    def _apply_expert_bias(self, chosen: torch.Tensor, **_options: object) -> None:
        # It counts each expert's tokens, for a bias that follows them: ours does not, and its mask has a shape too few.
        super()._apply_expert_bias(chosen)

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        coefficient: float,
        loss: torch.Tensor,
        name: str,
        group: dist.ProcessGroup,
        **_options: object,
    ) -> torch.Tensor:
        """Have the backward pass of `activation` start at `loss` too: this rank's part of the micro-batch's."""
        self.balance += (loss.detach() / coefficient * self._tokens).cpu()
        return MoEAuxLossAutoScaler.apply(activation, loss * self._tokens)


class ExpertBalance:
    """Weighs that loss: the coefficient, times its mean over the tokens of a mini-batch, summed over layers."""

    def __init__(self, module: "ModelChunks", coefficient: float, place: Place):
        self.config: TransformerConfig = module.config
        self.coefficient, self.place = coefficient, place
        self.routers = [layer for layer in module.modules() if isinstance(layer, BalancingRouter)]
        self._tokens = 1.0

    def begin(self, packs: Sequence[Packed]) -> None:
        """Prepare for the passes over this rank's part of a mini-batch. A collective act."""
        if not self.coefficient:
            return
        tokens = sum(packed.tokens.shape[1] - packed.padding_tokens for packed in packs if packed.samples)
        self._tokens = self._over_all(tokens / (self.place.tensor_size * self.place.pipeline_size))
        self.config.moe_aux_loss_coeff = self.coefficient / self._tokens
        for router in self.routers:
            router.balance.zero_()

    def end(self) -> dict[str, float]:
        """Return the mean of the loss over tokens and layers, on rank 0; 1 is even, the number of experts uneven."""
        if not self.coefficient:
            return {}
        self.config.moe_aux_loss_coeff = 0.0
        layers = sum(self.config.moe_layer_freq)
        mean = self._over_all(sum(float(router.balance) for router in self.routers)) / (self._tokens * layers)
        return {"actor/load_balancing_loss": mean} if self.place.rank == 0 else {}

    def _over_all(self, value: float) -> float:
        device = self.routers[0].weight.device if self.routers else torch.device("cpu")
        total = torch.tensor(value, dtype=torch.float32, device=device)
        dist.all_reduce(total)
        return float(total)


def mask_of(packed: Packed, config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Return what a chunk is given beside a micro-batch's tokens: which are padding [1, C], where experts are balanced.

    Nothing where they aren't, and of a micro-batch without samples.
    """
    if not config.num_moe_experts or not config.moe_aux_loss_coeff or not packed.samples:
        return {}
    mask = torch.zeros_like(packed.tokens, dtype=torch.bool)
    mask[0, mask.shape[1] - packed.padding_tokens :] = True
    return {"padding_mask": mask}
