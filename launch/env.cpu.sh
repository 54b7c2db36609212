# Sourced by the CPU launchers. One thread a rank: ranks are what share the cores. (The rest of a rank's environment is
# the program's own: spmd_rl/platforms/cpu.py.) Libraries that must be in place before Python starts, such as another
# allocator, can be named: SPMD_RL_PRELOAD=/path/to/libtcmalloc.so bash launch/demo.sh
export OMP_NUM_THREADS=1
if [[ -n "${SPMD_RL_PRELOAD:-}" ]]; then
    export LD_PRELOAD="$SPMD_RL_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}"
fi
