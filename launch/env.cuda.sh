# Sourced by the launchers on machines with NVIDIA GPUs; what is set already stays. Nothing here changes what a run computes.
# (What the program itself needs, it sets: spmd_rl/platforms/cuda.py.) Not run on such a cluster by this project yet.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# A rank that dies must not leave the others waiting: when a collective fails or is late, its process ends, and torchrun
# names it. 3 is torch's own default, written down because everything above relies on it. How late is
# run.collective_timeout_seconds. https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
# One line where NCCL itself has something to say.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# The interface for NCCL's first contact is set by launch/torchrun.sh (NCCL_SOCKET_IFNAME, an exact name after "="); the InfiniBand
# adapters can be named with NCCL_IB_HCA. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html

# Another allocator must be in place before Python starts: SPMD_RL_PRELOAD=/path/to/libjemalloc.so.2 bash launch/torchrun.sh ...
if [[ -n "${SPMD_RL_PRELOAD:-}" ]]; then
    export LD_PRELOAD="$SPMD_RL_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}"
fi
