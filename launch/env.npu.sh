# Sourced by the launchers on machines with Ascend NPUs; what is set already stays. Nothing here changes what a run computes.
# (What the program itself needs, it sets: spmd_rl/platforms/npu.py.) Not run on such a cluster by this project yet.

# CANN's own variables, and those of its library of operators (atb): an image may have set the first alone. Their scripts read
# variables that may be unset, and call programs that may fail.
source_vendor() {
    local options="$-" pipefail
    pipefail=$(shopt -po pipefail) || true
    set +eu +o pipefail
    source "$1"
    [[ "$options" == *e* ]] && set -e
    [[ "$options" == *u* ]] && set -u
    eval "$pipefail"
}
SPMD_RL_ASCEND="${SPMD_RL_ASCEND:-/usr/local/Ascend}"
if [[ -z "${ASCEND_HOME_PATH:-}" && -f "$SPMD_RL_ASCEND/ascend-toolkit/set_env.sh" ]]; then
    source_vendor "$SPMD_RL_ASCEND/ascend-toolkit/set_env.sh"
fi
if [[ -z "${ATB_HOME_PATH:-}" && -f "$SPMD_RL_ASCEND/nnal/atb/set_env.sh" ]]; then
    source_vendor "$SPMD_RL_ASCEND/nnal/atb/set_env.sh"
fi
unset -f source_vendor
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# The host port of every rank's first contact. 16 or more free ports; reserve them with
#   sysctl -w net.ipv4.ip_local_reserved_ports=60000-60015
# so that no other connection takes one. Set it where two runs share a node.
export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-60000}"
# The interface is set by launch/torchrun.sh (HCCL_SOCKET_IFNAME, an exact name after "=").

# Many small host allocations by many threads are what glibc is slow at. The first of these that exists is put in place before
# Python starts; SPMD_RL_PRELOAD names another, SPMD_RL_PRELOAD= (empty) none.
if [[ -z "${SPMD_RL_PRELOAD+set}" ]]; then
    # Debian and Ubuntu, openEuler, and where `make install` of its sources puts it.
    for place in /usr/lib/"$(uname -m)"-linux-gnu /usr/lib64 /usr/local/lib /usr/local/lib64; do
        library="${SPMD_RL_ROOT:-}$place/libjemalloc.so.2"
        [[ -f "$library" ]] && SPMD_RL_PRELOAD="$library" && break
    done
fi
if [[ -n "${SPMD_RL_PRELOAD:-}" ]]; then
    export LD_PRELOAD="$SPMD_RL_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}"
fi
