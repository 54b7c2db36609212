# Sourced by the *.sbatch files beside it: starts the program on all nodes of the job, and puts the job back into the queue when
# its time or its place is about to be taken. Nothing here is a setting of the run.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is started by sbatch, from the root of the source}"
if [[ $# -eq 0 || ! -f launch/torchrun.sh ]]; then
    echo "usage, from the root of the source: sbatch [--nodes N] launch/slurm/${SLURM_JOB_NAME:-NAME.sbatch} -m spmd_rl.grpo --config FILE" >&2
    exit 2
fi

export NNODES="$SLURM_JOB_NUM_NODES"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*} # the first
# Two ports of the job's own, below those that the kernel gives away by itself.
export MASTER_ADDR MASTER_PORT=$((15000 + SLURM_JOB_ID % 8000 * 2)) RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"

# One task a node. NODE_RANK is known in the task only. A node that fails ends the others: torchrun cannot go on without it.
srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash launch/torchrun.sh "$@"' launch "$@" &
step=$!

again=0
ask_for_checkpoint() {
    again=1
    echo "slurm: job $SLURM_JOB_ID must leave soon; the ranks are asked for a checkpoint"
    kill -USR1 "$step" 2>/dev/null || true # srun passes it on to its task on every node
}
trap ask_for_checkpoint USR1
trap 'kill -TERM "$step" 2>/dev/null || true' TERM

while :; do
    status=0
    wait "$step" || status=$?
    kill -0 "$step" 2>/dev/null || break
done
if ((again)); then
    echo "slurm: job $SLURM_JOB_ID ended with status $status after that; it goes back into the queue"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
