# Sourced by the CPU launchers. One thread a rank: ranks are what share the cores. (The rest of a rank's environment is
# the program's own: spmd_rl/platforms/cpu.py.) Libraries that must be in place before Python starts, such as another
# allocator, can be named: SPMD_RL_PRELOAD=/path/to/libtcmalloc.so bash launch/demo.sh
export OMP_NUM_THREADS=1
# Heap memory in pages of 2 MiB: training and rollout hand each other gigabytes that are touched anew each time, and 4 KiB
# pages make that three times slower. Read when a process starts.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
if [[ -n "${SPMD_RL_PRELOAD:-}" ]]; then
    export LD_PRELOAD="$SPMD_RL_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}"
fi
