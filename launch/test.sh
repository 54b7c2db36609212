#!/usr/bin/env bash
# The whole test suite, set-up included: bash launch/test.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_env.sh cpu
source launch/env.cpu.sh

.venv/bin/ruff check
.venv/bin/ruff format --check
exec .venv/bin/python -m pytest "$@"
