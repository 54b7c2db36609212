#!/usr/bin/env bash
# A small real model learns arithmetic on two CPU ranks, set-up included: bash launch/demo.sh [--section.key value ...]
# A tiny one that sees learns to name colours: bash launch/demo.sh vision [--section.key value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_env.sh cpu
source launch/env.cpu.sh
export PATH="$PWD/.venv/bin:$PATH"

config=configs/demo_smollm2_cpu.yaml
model=models/smollm2-135m-instruct
make=tools/make_demo_model.py
if [[ "${1:-}" == vision ]]; then
    shift
    config=configs/demo_vlm_cpu.yaml model=models/demo-vlm make=tools/make_vision_demo.py
fi
[[ -d "$model" ]] || python "$make" --output "$model"
python -m spmd_rl.runtime.torchrun --standalone --nproc_per_node 2 -m spmd_rl.grpo --config "$config" "$@"

run_dir=$(python -c 'import sys; from spmd_rl.config.loading import load_config; run = load_config(sys.argv[1:]).run; print(run.dir or f"runs/{run.name}")' --config "$config" "$@")
python tools/plot_run.py "$run_dir" --text
