#!/usr/bin/env bash
# Makes .venv for one kind of machine: bash launch/setup_env.sh cpu|cuda|npu   (PYTHON=/path/to/python3.11 to choose the interpreter)
# A stamp in .venv says what was installed: while it is right, a second call does nothing; after a change of the requirements
# the difference is installed; a set-up that was interrupted is made anew. A .venv that is not this script's own is never touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind="${1:-}"
requirements="requirements-$kind.txt"
if [[ $# -ne 1 || ! "$kind" =~ ^(cpu|cuda|npu)$ ]]; then
    echo "usage: bash launch/setup_env.sh cpu|cuda|npu" >&2
    exit 2
fi

stamp=.venv/spmd_rl.stamp
# The path is part of it: a virtual environment does not survive being moved.
wanted="$kind $(sha256sum <"$requirements" | cut -c1-16) $PWD"
ready() { [[ -x .venv/bin/python && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; }
ready && exit 0

# Two calls at once: the second waits, and finds everything done. (The lock is on the folder: no file is left behind.)
if command -v flock >/dev/null; then
    exec 9<.
    flock 9
    ready && exit 0
fi

# The image for NPUs brings its own Python, which .venv must share. The pins for CPUs are of one version.
[[ "$kind" == cpu ]] && versions="3.11" || versions="3.11 3.12"
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
python=
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    version=$(version_of "$candidate") && [[ " $versions " == *" $version "* ]] && python=$candidate && break
done
if [[ -z "$python" ]]; then
    found=$(version_of "${PYTHON:-python3}") || found="missing or broken"
    echo "setup_env: Python ${versions/ / or } is needed, and ${PYTHON:-python3} is $found. Install python3.11 with its venv module," \
         "or name one: PYTHON=/path/to/python3.11 bash launch/setup_env.sh $kind" >&2
    exit 1
fi

if [[ "$kind" == npu ]]; then
    for package in torch torch_npu vllm vllm-ascend transformers; do
        if ! "$python" -c "from importlib.metadata import version; version('$package')" 2>/dev/null; then
            echo "setup_env: $package is not installed for $python: start from the image that $requirements names" >&2
            exit 1
        fi
    done
fi

say() { printf 'setup_env: %s\n' "$*"; }
pip() {
    .venv/bin/python -m pip --disable-pip-version-check install -qq --root-user-action=ignore --no-warn-script-location --progress-bar off "$@"
}
started=$SECONDS

# Checked first: pip says "No space left on device" after minutes, and names no folder. Megabytes, as a new .venv takes for CPUs.
enough() { # enough FOLDER MEGABYTES WAY_OUT
    local free
    free=$(df -BM --output=avail "$1" 2>/dev/null | tr -dc 0-9) || return 0
    [[ -z "$free" ]] || ((free >= $2)) && return
    echo "setup_env: $1 has $free MB free, and set-up needs $2 MB there: make room, or $3" >&2
    exit 1
}
if [[ "$kind" == cpu && ! -e .venv ]]; then
    wheels=${TMPDIR:-/tmp}
    if [[ "$(df --output=target . 2>/dev/null)" == "$(df --output=target "$wheels" 2>/dev/null)" ]]; then
        enough "$PWD" 3900 "use a checkout on another disk"
    else
        enough "$PWD" 3300 "use a checkout on another disk"
        enough "$wheels" 600 "name another folder for what is downloaded: TMPDIR=/path bash launch/setup_env.sh $kind"
    fi
fi

# The stamp's states: "<kind> <hash> <path>" when whole, "unfinished <kind>" while the script works, none: not ours, or cut off at once.
state=$(cat "$stamp" 2>/dev/null || true)
if [[ ! -e .venv || "$state" == unfinished\ * ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "1/4 new .venv with $("$python" --version 2>&1)"
    [[ "$kind" == npu ]] && image=--system-site-packages || image=
    "$python" -m venv --clear $image .venv
elif [[ "$state" != "$kind "*" $PWD" ]]; then
    echo "setup_env: there is a .venv that works but was ${state:+made as \"$state\", }not made here for $kind: remove it (rm -r .venv) or move it away" >&2
    exit 1
fi
echo "unfinished $kind" >"$stamp"

case "$kind" in
cpu)
    # The plain release of torch is a CUDA build on Linux; only a CPU build carries +cpu, on PyTorch's own index or a local file.
    say "2/4 torch (a CPU build, about 200 MB)"
    torch=$(grep -E '^torch==' "$requirements")
    pip --no-deps "$torch+cpu" 2>/dev/null || pip --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch+cpu"
    say "3/4 $(grep -cE '^[A-Za-z]' "$requirements") pinned packages (vLLM, Megatron-Core, transformers, ...); two to three minutes"
    pip --no-deps -r "$requirements"
    ;;
cuda)
    say "3/4 torch, vLLM and what they need (several GB)"
    pip -r "$requirements"
    ;;
npu)
    # What the image has stays as it is, whatever its version: it was tested together. The doctor says where it differs.
    have=$("$python" -m pip --disable-pip-version-check list --format=freeze 2>/dev/null)
    normal() { sed -E 's/[=<>!~@ ].*//; s/[-_.]+/-/g' | tr '[:upper:]' '[:lower:]'; }
    names=$(normal <<<"$have")
    grep -E '^[A-Za-z]' "$requirements" | while read -r line; do
        grep -qx "$(normal <<<"$line")" <<<"$names" || echo "$line"
    done >".venv/$requirements"
    (grep -E '^[A-Za-z0-9_.-]+==' <<<"$have" || true) >.venv/image.txt
    say "3/4 what is added to it: $(wc -l <".venv/$requirements") packages; what the image has stays"
    pip -r ".venv/$requirements" -c .venv/image.txt
    ;;
esac
say "4/4 spmd_rl itself (editable)"
pip "setuptools>=78,<81"
pip --no-deps --no-build-isolation --editable .

printf '%s\n' "$wanted" >"$stamp"
say "done in $((SECONDS - started)) s: .venv is ready"
