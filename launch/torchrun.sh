#!/usr/bin/env bash
# Starts a program on one node or, called once on each, on many:
#   bash launch/torchrun.sh -m spmd_rl.grpo --config FILE [--section.key value ...]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash launch/torchrun.sh -m spmd_rl.grpo --config FILE     (NODE_RANK=1 on the other)
# Each variable is also a flag, before -m: --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
#   NNODES          nodes (1)                                NODE_RANK     this one, from 0
#   MASTER_ADDR     an address of node 0 that all reach      MASTER_PORT   torchrun's port there (29500)
#   MEET_PORT       for the checks before (MASTER_PORT + 1)  WAIT_SECONDS  for the other nodes (300)
#   NPROC_PER_NODE  ranks (all NPUs or GPUs; CPU: 2)         MAX_RESTARTS  (0) torchrun starts all ranks again so often
#   PLATFORM        cpu, cuda or npu (what is found)         PYTHON        (.venv/bin/python where it exists)
#   CHECK=0         start without comparing the nodes
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Ignored here and in all that is started here, so that it does no harm before the ranks listen.
trap '' USR1

die() {
    echo "launch: $*" >&2
    exit 2
}

while [[ $# -gt 0 && "$1" == --* ]]; do
    case "${1%%=*}" in
    --nnodes | --node-rank | --master-addr | --master-port | --meet-port | --wait-seconds | --nproc-per-node | --max-restarts | --platform)
        name="${1%%=*}" && name="${name#--}" && name="${name//-/_}"
        if [[ "$1" == *=* ]]; then
            value="${1#*=}" && shift
        else
            [[ $# -ge 2 ]] || die "$1 needs a value"
            value="$2" && shift 2
        fi
        printf -v "${name^^}" '%s' "$value"
        ;;
    --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "$1: there is no such flag; the program's own settings come after -m MODULE" ;;
    esac
done
[[ $# -gt 0 ]] || die "what shall run? bash launch/torchrun.sh -m spmd_rl.grpo --config FILE"

NNODES="${NNODES:-1}" NODE_RANK="${NODE_RANK:-}" MASTER_PORT="${MASTER_PORT:-29500}" MAX_RESTARTS="${MAX_RESTARTS:-0}"
for name in NNODES MASTER_PORT MAX_RESTARTS; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || die "$name = ${!name}: expected a whole number"
done
if ((NNODES > 1)); then
    [[ -n "$NODE_RANK" ]] || die "NNODES = $NNODES: set NODE_RANK on each node, from 0 to $((NNODES - 1))"
    [[ -n "${MASTER_ADDR:-}" ]] || die "NNODES = $NNODES: set MASTER_ADDR to an address of node 0 that all nodes reach"
fi
NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MEET_PORT="${MEET_PORT:-$((MASTER_PORT + 1))}"

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$here/.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON="$(command -v python3 || true)"
fi
"$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("torch") is None)' 2>/dev/null ||
    die "PYTHON = ${PYTHON:-nothing}: torch is not installed there; bash launch/setup_env.sh cpu|cuda|npu makes .venv"

# Devices are counted by their files: no driver is started, and no device is held.
count() {
    local found=0 file
    for file in $1; do
        [[ -e "$file" && "${file##*/}" =~ ^(davinci|nvidia)[0-9]+$ ]] && found=$((found + 1))
    done
    echo "$found"
}
listed() { tr ',' '\n' <<<"$1" | grep -c .; }
dev="${SPMD_RL_DEV:-/dev}"
npus=$(count "$dev/davinci*") gpus=$(count "$dev/nvidia*")
if [[ -z "${PLATFORM:-}" ]]; then
    if ((npus)); then PLATFORM=npu; elif ((gpus)); then PLATFORM=cuda; else PLATFORM=cpu; fi
fi
case "$PLATFORM" in
npu) devices=$npus visible="${ASCEND_RT_VISIBLE_DEVICES:-}" ;;
cuda) devices=$gpus visible="${CUDA_VISIBLE_DEVICES:-}" ;;
cpu) devices=2 visible="" ;;
*) die "PLATFORM = $PLATFORM: there are cpu, cuda and npu" ;;
esac
[[ -z "$visible" ]] || devices=$(listed "$visible")
NPROC_PER_NODE="${NPROC_PER_NODE:-$devices}"
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] ||
    die "NPROC_PER_NODE = $NPROC_PER_NODE: PLATFORM = $PLATFORM has $devices devices here; name another platform or a number"
if [[ "$PLATFORM" != cpu ]] && ((NPROC_PER_NODE > devices)); then
    die "NPROC_PER_NODE = $NPROC_PER_NODE: there are $devices $PLATFORM devices on this node"
fi

source "$here/launch/env.$PLATFORM.sh"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # addresses without a host name are no news
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

# All nodes compare notes; the answer is this node's interface and address on the way to the others. (The host's name, which
# gloo and torchrun would ask otherwise, often leads to 127.0.0.1.)
way=$("$PYTHON" -m spmd_rl.doctor.before_launch --nnodes "$NNODES" --node-rank "$NODE_RANK" \
    --nproc-per-node "$NPROC_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --meet-port "$MEET_PORT" \
    --wait-seconds "${WAIT_SECONDS:-300}" --check "${CHECK:-1}" -- "$@") || exit $?
read -r interface address <<<"$way"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" # on one node the loopback: nobody else can connect
if ((NNODES > 1)); then
    case "$PLATFORM" in
    npu) export HCCL_SOCKET_IFNAME="${HCCL_SOCKET_IFNAME:-=$interface}" ;;
    cuda) export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}" ;;
    esac
fi

# torchrun's own meeting place (c10d) is what lets all nodes start again together after one of them lost a rank.
is_host=$([[ "$NODE_RANK" == 0 ]] && echo true || echo false)
"$PYTHON" -m spmd_rl.runtime.torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \
    --max-restarts "$MAX_RESTARTS" --rdzv-backend c10d --rdzv-id "${RUN_ID:-spmd_rl}" \
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "is_host=$is_host" --local-addr "$address" "$@" &
agent=$!

# torchrun passes on what ends a run, but not USR1, which asks the ranks for a checkpoint: they are its children.
to_ranks() {
    local ranks
    ranks=$(cat /proc/"$agent"/task/*/children 2>/dev/null || true)
    [[ -z "$ranks" ]] || kill -USR1 $ranks 2>/dev/null || true
}
trap to_ranks USR1
trap 'kill -TERM "$agent" 2>/dev/null || true' TERM HUP
trap 'kill -INT "$agent" 2>/dev/null || true' INT
# A signal ends a wait; the program's own status comes with the wait after which it is gone.
while :; do
    status=0
    wait "$agent" || status=$?
    kill -0 "$agent" 2>/dev/null || exit "$status"
done
