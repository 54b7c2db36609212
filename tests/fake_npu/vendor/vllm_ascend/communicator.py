"""Stands for vLLM's collectives over HCCL, which takes parts of unequal size: gloo's, with those."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from spmd_rl.patches.vllm_groups import gather_unequal, scatter_unequal_sums


class NPUCommunicator(CpuCommunicator):
    """Without memory that ranks share."""

    all_gatherv = gather_unequal(None)
    reduce_scatterv = scatter_unequal_sums(None)

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
