#!/usr/bin/env bash
# Makes .venv in the repository root and installs April into it; quick when nothing has changed.
#
#   launch/install.sh [EXTRAS]        EXTRAS: dev (default), all, or a list such as learner,report
#
# APRIL_PYTHON        interpreter for a new .venv; otherwise the first one of version 3.11 or newer is taken
# APRIL_TORCH         what to install as torch (default torch==2.13.0)
# APRIL_TORCH_INDEX   package index for torch alone, for example the one with its CPU wheels
# APRIL_ALLOW_CUDA=1  accept CUDA packages on a machine without an accelerator
# PIP_COMPILE=1       compile all that is installed now, not each module when it is first imported
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv_python=$root/.venv/bin/python
torch=${APRIL_TORCH:-torch==2.13.0}
torch_index=${APRIL_TORCH_INDEX:-}
devices=${APRIL_DEVICES_DIR:-/dev}   # another folder only in tests
# Modules are compiled when they are first imported, or all of them now where Python may not keep what it compiles.
export PIP_COMPILE=${PIP_COMPILE:-${PYTHONDONTWRITEBYTECODE:+1}}
: "${PIP_COMPILE:=0}"

say() { echo "april: $*"; }
fail() { echo "april: $*" >&2; exit 1; }
pip() { "$venv_python" -m pip --disable-pip-version-check --no-input "$@"; }

find_python() {
    local candidate
    for candidate in ${APRIL_PYTHON:-python3 python python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found${APRIL_PYTHON:+ at $APRIL_PYTHON}; install one, or set APRIL_PYTHON to its path"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make a virtual environment with pip; install its venv package (on Debian: apt install python3-venv)"
    say "making .venv with $("$python" --version)"
    "$python" -m venv "$root/.venv"
}

check_venv() {
    "$venv_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$root/.venv has no working Python 3.11 or newer; remove that folder and call this again"
    pip --version >/dev/null 2>&1 ||
        fail "$root/.venv has no pip; run '$venv_python -m ensurepip' or remove that folder and call this again"
}

# What an installation depends on, as one word.
fingerprint() {
    "$venv_python" - "$root" "$torch" "$torch_index" <<'PY'
import hashlib, pathlib, sys
settings = "\n".join(sys.argv[1:]).encode()
print(hashlib.sha256(pathlib.Path(sys.argv[1], "pyproject.toml").read_bytes() + settings).hexdigest())
PY
}

has_accelerator() {
    [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] || compgen -G "$devices/nvidia*" >/dev/null || [ -e "$devices/kfd" ]
}

# pip install; without an accelerator nothing that CUDA alone can use (a dry run would already download it).
install() {
    local guard=() log
    if [ "${APRIL_ALLOW_CUDA:-}" != 1 ] && ! has_accelerator; then guard=(-c "$root/launch/no-cuda.txt"); fi
    log=$root/.venv/april-pip.log
    rm -f "$log"
    pip install -qq --progress-bar off --log "$log" ${guard[@]+"${guard[@]}"} "$@" 2>"$log.errors" && return
    grep -v '^WARNING: ' "$log.errors" >&2 || true
    if grep -qE 'requested \(constraint\)|No matching distribution found for (nvidia|cuda|triton|pytorch-triton)' "$log"; then
        fail "this machine has no accelerator, but these packages would bring CUDA with them: $*;" \
            "set APRIL_TORCH_INDEX to PyTorch's CPU wheel index, as shown on PyTorch's own \"Get started\" page," \
            "or APRIL_ALLOW_CUDA=1 to accept the large download"
    fi
    fail "pip could not install $*; its reason stands above, the details in $log (is the package index reachable?)"
}

install_all() {
    local torch_arguments=("$torch")
    [ -z "$torch_index" ] || torch_arguments+=(--index-url "$torch_index")
    # Older pips fetch a whole package to learn what it needs, and take twice the processor's time.
    pip install -qq 'pip>=25.3' || say "going on with $(pip --version), which could not be updated"
    say "installing $torch"
    install "${torch_arguments[@]}"
    say "installing April with its extras: $extras"
    install --editable "${root}[$extras]"
}

extras=${1:-dev}
case $extras in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *[!a-z0-9,]*) fail "extras '$extras' are not a list of names; use dev, all, or for example learner,report" ;;
esac

[ -e "$root/.venv" ] || make_venv
check_venv
now=$(fingerprint)
stamp=$root/.venv/april-installed
# A line of the stamp is a fingerprint and the extras installed under it; dev includes all.
enough=("-e" "$now $extras")
[ "$extras" != all ] || enough+=("-e" "$now dev")
if grep -qxF "${enough[@]}" "$stamp" 2>/dev/null; then
    say "already installed ($extras)"
else
    install_all
    { grep "^$now " "$stamp" 2>/dev/null || true; echo "$now $extras"; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "installed in $root/.venv"
fi
