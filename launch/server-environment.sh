#!/usr/bin/env bash
# Read by install-sglang.sh and others: makes the environment of a server that April's workers start, which has its own
# because such a package pins its own torch, or of a framework in which April is installed, too.
#
# The script that reads it sets `venv` and `package`, defines install_for_cpu, and calls make_environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch_index=${APRIL_TORCH_INDEX:-}
devices=${APRIL_DEVICES_DIR:-/dev}   # another folder only in tests
# Modules are compiled when they are first imported, or all of them now where Python may not keep what it compiles.
export PIP_COMPILE=${PIP_COMPILE:-${PYTHONDONTWRITEBYTECODE:+1}}
: "${PIP_COMPILE:=0}"

say() { echo "april: $*"; }
fail() { echo "april: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${APRIL_PYTHON:-python3 python python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found${APRIL_PYTHON:+ at $APRIL_PYTHON}; install one, or set APRIL_PYTHON to its path"
}

has_accelerator() {
    [ "${APRIL_ALLOW_CUDA:-}" != 1 ] || return 0
    [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] || compgen -G "$devices/nvidia*" >/dev/null || [ -e "$devices/kfd" ]
}

install() {
    local log=$venv/april-pip.log
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -qq --progress-bar off --log "$log" "$@" \
        2>"$log.errors" && return
    grep -v '^WARNING: ' "$log.errors" >&2 || true
    fail "pip could not install $*; its reason stands above, the details in $log" \
        "(is the package index reachable?)"
}

# A CPU build, from the index that has them where one is given.
install_torch() {
    if [ -n "$torch_index" ]; then install "$1" --index-url "$torch_index"; else install "$1"; fi
}

# Modules that stand in for compiled parts without which a package does not import on a CPU.
add_modules() {
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$@" "$packages/"
    echo 'import torchvision_operators' >"$packages/torchvision_operators.pth"
}

# What an accelerator needs; scripts may say otherwise.
install_for_accelerator() { install "$package"; }

# make_environment NAME MODULE FILES...: the package, unless that very one is there; FILES are what the recipe depends on.
make_environment() {
    local name=$1 module=$2 kind=cpu now python
    shift 2
    if has_accelerator; then kind=accelerator; fi
    now=$({ echo "$kind $package $torch_index"; cat "$@"; } | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$venv/april-installed" 2>/dev/null)" = "$now" ]; then
        say "$name is already installed"
        return
    fi
    if [ ! -e "$venv" ]; then
        python=$(find_python)
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python cannot make a virtual environment with pip; install its venv package (on Debian: apt install python3-venv)"
        "$python" -m venv "$venv"
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        fail "$venv has no working Python with pip; remove that folder and call this again"
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -qq 'pip>=25.3' ||
        say "going on with $("$venv/bin/python" -m pip --version), which could not be updated"
    say "installing $package for this machine's $kind (about 3 GB)"
    if [ "$kind" = cpu ]; then install_for_cpu; else install_for_accelerator; fi
    "$venv/bin/python" -c "import $module" || fail "$name is installed but cannot be imported; its reason stands above"
    echo "$now" >"$venv/april-installed"
    say "$name is installed in $venv"
}

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
    *) fail "argument '$1' is unknown; this script takes none, see --help" ;;
esac
