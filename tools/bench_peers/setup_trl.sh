#!/usr/bin/env bash
# Makes the peer's own environment: bash tools/bench_peers/setup_trl.sh [DIRECTORY]   (default .venv-trl; PYTHON=... to choose python3.11)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-.venv-trl}
python=${PYTHON:-python3.11}

if [[ $# -gt 1 || "$venv" == -* ]]; then
    echo "usage: bash tools/bench_peers/setup_trl.sh [DIRECTORY]" >&2
    exit 2
fi
if [[ -e "$venv" ]]; then
    echo "setup_trl: $venv is there already: use it, remove it, or name another directory" >&2
    exit 1
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    echo "setup_trl: Python 3.11 is needed, and $python is not: PYTHON=/path/to/python3.11 bash tools/bench_peers/setup_trl.sh" >&2
    exit 1
}
"$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip --disable-pip-version-check install -qq --progress-bar off --no-deps "$@"; }
# On Linux the plain release of torch is a CUDA build; only a CPU build carries +cpu, on PyTorch's own index or in a local file.
install "torch==2.13.0+cpu" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
install -r "$here/requirements-trl.txt"
echo "setup_trl: $venv is ready"
