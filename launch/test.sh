#!/usr/bin/env bash
# The tests, set-up included: bash launch/test.sh [quick|main|nightly|coverage|device] [arguments for pytest]
#   quick    no rank, no engine, nothing that takes seconds: at every save
#   main     each law once, on real ranks and engines too: before a change lands (what is run where nothing is named)
#   nightly  everything there is, in another order each time
#   coverage main, and the lines that it did not run, of ranks' processes too
#   device   on the NPU or GPU that is here, with what is installed: the training half's laws and speed, without vLLM;
#            its arguments are those of tools/bench_update.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
quick | main | nightly | coverage) set=$1 && shift ;;
device)
    shift
    [[ -x .venv/bin/python ]] && python=.venv/bin/python || python="${PYTHON:-python3}"
    exec "$python" tools/bench_update.py "$@"
    ;;
*) set=main ;;
esac
bash launch/setup_env.sh cpu
source launch/env.cpu.sh
[[ "$(locale charmap 2>/dev/null)" == UTF-8 ]] || export PYTHONUTF8=1 # as the files that tests read

.venv/bin/ruff check
.venv/bin/ruff format --check
# Two at a time: while one starts, or waits for its ranks, the other computes. The order of files is tests/conftest.py's.
two=(-n 2 --dist loadfile --no-loadscope-reorder)
python=.venv/bin/python
case "$set" in
quick) exec $python -m pytest -m "not spmd and not slow and not long" "${two[@]}" "$@" ;;
main) exec $python -m pytest -m "not slow" "${two[@]}" "$@" ;;
nightly) SPMD_RL_KILLS=10 exec $python -m pytest --full --shuffle "$(date +%j)" "${two[@]}" "$@" ;;
esac
$python -m coverage erase
status=0
$python -m coverage run -m pytest -m "not slow" "$@" || status=1
$python -m coverage combine -q && $python -m coverage report
exit "$status"
