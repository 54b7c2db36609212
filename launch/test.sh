#!/usr/bin/env bash
# The tests, set-up included: bash launch/test.sh [quick|main|nightly] [arguments for pytest]
#   quick    no rank, no engine, nothing that takes seconds: at every save
#   main     each law once, on real ranks and engines too: before a change lands (what is run where nothing is named)
#   nightly  everything there is, in another order each time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
quick | main | nightly) set=$1 && shift ;;
*) set=main ;;
esac
bash launch/setup_env.sh cpu
source launch/env.cpu.sh

.venv/bin/ruff check
.venv/bin/ruff format --check
status=0
pytest() { # 5: none of the tests that were asked for is in this part of the set
    .venv/bin/python -m pytest "$@" || { [[ $? == 5 ]] || status=1; }
}
long=""
[[ "$set" != quick ]] || long=" and not long"
[[ "$set" == nightly ]] || pytest -m "not spmd and not slow$long" -n 2 --dist loadfile "$@"
[[ "$set" != main ]] || pytest -m "spmd and not slow" "$@"
[[ "$set" != nightly ]] || SPMD_RL_KILLS=10 pytest --full --shuffle "$(date +%j)" "$@"
exit "$status"
