"""The experts of a layer as one module over stacked weights, and the way of the tokens to them and back."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.parallel_state import get_tensor_and_data_parallel_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from spmd_rl.platforms import current
from spmd_rl.platforms.grouped_matmul import ExpertCounts
from spmd_rl.training.expert_dispatch import TokenDispatcher
from spmd_rl.training.expert_replay import ExpertChoices


class _Stacked(torch.nn.Module):
    """Hold one weight of all experts, as vLLM does: [E, out, in]."""

    def __init__(self, *size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(*size, dtype=dtype))


class GroupedExperts(MegatronModule):
    """Hold this rank's experts: gate and up projections below each other, then down; tokens lie expert by expert.

    Where several ranks share each expert, a rank has a part of the channels of all of them.
    """

    def __init__(self, local: int, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config=config)
        self.local, self.groups = local, pg_collection
        shared = pg_collection.expt_tp.size()
        channels, dtype = config.moe_ffn_hidden_size // shared, config.params_dtype
        self.linear_fc1 = _Stacked(local, 2 * channels, config.hidden_size, dtype=dtype)
        self.linear_fc2 = _Stacked(local, config.hidden_size, channels, dtype=dtype)
        for weight, dimension in ((self.linear_fc1.weight, 1), (self.linear_fc2.weight, 2)):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)
            # Its gradient is summed over the ranks that hold the same experts, and not over all.
            weight.allreduce = False
        self.matmul, self.swiglu = current().grouped_matmul, current().weighted_swiglu

    def forward(self, x: torch.Tensor, counts: ExpertCounts, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x [T, H], probs [T], the weight of each token's expert -> [T, H]; the None stands for a bias."""
        inner = self.swiglu(self.matmul(x, self.linear_fc1.weight, counts), probs)
        return self.matmul(inner, self.linear_fc2.weight, counts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Describe the weights for a checkpoint, whose files are those of one module for each expert."""
        ranks, groups = self.groups.expt_tp, self.groups
        first, count = groups.ep.rank() * self.local, groups.ep.size() * self.local
        described: dict[str, object] = {}
        for name, layer, halves in (("linear_fc1", self.linear_fc1, 2), ("linear_fc2", self.linear_fc2, 1)):
            key = f"{prefix}experts.{name}"
            replica = (0, 0, groups.expt_dp.rank())
            build = partial(_by_expert, sharded_offsets, first, count, ranks.rank(), ranks.size(), halves)
            described[f"{prefix}{name}.weight"] = ShardedTensorFactory(
                f"{key}.weight", layer.weight, build, partial(_together, self.local), replica
            )
            for expert in range(first, first + self.local):
                at = (*sharded_offsets, (len(sharded_offsets), expert, count))
                # Megatron's own layers save an empty object beside each weight, and ask for it.
                described[f"{prefix}{expert}.{name}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{key}._extra_state", at, (0, ranks.rank(), groups.expt_dp.rank())
                )
        return described

    def _load_from_state_dict(self, state: dict[str, object], prefix: str, *others: object) -> None:
        for name in [name for name in state if name.startswith(prefix) and name.endswith("._extra_state")]:
            del state[name]
        super()._load_from_state_dict(state, prefix, *others)


@torch.no_grad()
def _by_expert(
    offsets: tuple[object, ...],
    first: int,
    count: int,
    rank: int,
    ranks: int,
    halves: int,
    key: str,
    stacked: torch.Tensor,
    replica: tuple[int, ...],
    *others: object,
) -> list[ShardedTensor]:
    """Return each expert of a stack [E, ...] by itself, gate and up projections apart: all in one piece of memory."""
    lead = len(offsets)
    return [
        ShardedTensor.from_rank_offsets(
            key,
            part,
            *offsets,
            (lead, first + expert, count),
            # Gate and up are cut in rows, one below the other; down in columns.
            (lead + 1, half * ranks + rank, 2 * ranks) if halves == 2 else (lead + 2, rank, ranks),
            replica_id=replica,
            prepend_axis_num=lead + 1,
        )
        for expert, own in enumerate(stacked)
        for half, part in enumerate(own.chunk(halves))
    ]


@torch.no_grad()
def _together(experts: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).view(experts, -1, parts[0].shape[-1])


def dispatch_here(layer: MoELayer) -> MoELayer:
    """Have the tokens of a layer of experts go their way as training/expert_dispatch.py has it; return the layer."""
    layer.token_dispatcher = TokenDispatcher(layer.num_local_experts, layer.config, get_default_pg_collection())
    return layer


class Layer(TransformerLayer):
    """Megatron's layer, with its experts' dispatcher; they hear which micro-batch the layer is called with."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **options)
        self.choices: ExpertChoices | None = None
        if isinstance(self.mlp, MoELayer):
            dispatch_here(self.mlp)

    def replay(self) -> None:
        """Have samples say the experts of their tokens from now on, where they do."""
        if isinstance(self.mlp, MoELayer):
            self.choices = self.mlp.router.router_replay = ExpertChoices()

    def forward(self, hidden_states: torch.Tensor, *others: object, **options: Any) -> object:
        """hidden_states [T, 1, H]; see Megatron's."""
        if self.choices is not None:
            chosen, rank = options["packed_seq_params"].experts, self.mlp.attn_tp_group.rank()
            self.choices.take(chosen, self.layer_number - 1, len(hidden_states), rank)
        return super().forward(hidden_states, *others, **options)

    @property
    def load(self) -> torch.Tensor | None:
        """Return how many tokens this rank sent to each expert [E] since the last time; None: there are no experts."""
        if not isinstance(self.mlp, MoELayer):
            return None
        load, self.mlp.token_dispatcher.load = self.mlp.token_dispatcher.load, None
        return load


def load_imbalance(layers: Iterable[Layer]) -> float | None:
    """Return the tokens of the fullest expert over those of an even one, in the layer where that is most.

    Over all ranks that have these layers; None where there are no experts.
    """
    loads = [load for layer in layers if (load := layer.load) is not None]
    if not loads:
        return None
    counts = torch.stack(loads).float()
    torch.distributed.all_reduce(counts, group=get_tensor_and_data_parallel_group(with_context_parallel=True))
    return float((counts.amax(1) / counts.mean(1).clamp(min=1.0)).max())
