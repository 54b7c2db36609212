"""Megatron-Core's process groups for this run, and where this rank stands in them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from spmd_rl.distributed.layout import TrainLayout


@dataclass(frozen=True)
class Place:
    """Hold this rank's coordinates in Megatron's grid."""

    rank: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def reports(self) -> bool:
        """Of the ranks that compute the same losses, this one tells rank 0."""
        return self.last_stage and self.tensor_rank == 0 and self.context_rank == 0


def start_parallel(layout: TrainLayout, seed: int) -> Place:
    """Make Megatron's process groups; tensor groups are neighbours, pipeline stages farthest apart."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return Place(
        rank=dist.get_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=layout.tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=layout.pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=layout.context,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
    )
