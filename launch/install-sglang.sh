#!/usr/bin/env bash
# Makes .venv-sglang in the repository root with the SGLang server that April's workers start; quick when nothing has changed.
#
#   launch/install-sglang.sh
#
# With an accelerator this is SGLang's ordinary package. Without one it is the same release on torch's CPU build, run by
# torch's own operators: right, but slow; for tests and for trying things out.
#
# APRIL_PYTHON        interpreter for a new .venv-sglang; otherwise the first one of version 3.11 or newer is taken
# APRIL_SGLANG        what to install (default sglang==0.5.23)
# APRIL_SGLANG_VENV   where (default .venv-sglang in the repository root)
# APRIL_TORCH_INDEX   package index for torch's CPU build alone
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${APRIL_SGLANG_VENV:-$root/.venv-sglang}
sglang=${APRIL_SGLANG:-sglang==0.5.23}
torch_index=${APRIL_TORCH_INDEX:-}
cpu_files=$root/launch/sglang-cpu
devices=${APRIL_DEVICES_DIR:-/dev}   # another folder only in tests

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

# The same torch as the learner's on a CPU: SGLang's own pin has no CPU build.
install_for_cpu() {
    local torch
    torch=$(grep '^torch==' "$cpu_files/requirements.txt")
    if [ -n "$torch_index" ]; then install "$torch" --index-url "$torch_index"; else install "$torch"; fi
    install -r "$cpu_files/requirements.txt"
    install --no-deps torchvision==0.28.0 "$sglang"
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$cpu_files/sgl_kernel.py" "$cpu_files/torchvision_operators.py" "$packages/"
    echo 'import torchvision_operators' >"$packages/torchvision_operators.pth"
}

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) fail "argument '$1' is unknown; this script takes none, see --help" ;;
esac

kind=cpu
if has_accelerator; then kind=accelerator; fi
now=$({ echo "$kind $sglang $torch_index"; cat "$cpu_files"/*; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/april-installed" 2>/dev/null)" = "$now" ]; then
    say "SGLang is already installed"
    exit
fi
if [ ! -e "$venv" ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make a virtual environment with pip; install its venv package (on Debian: apt install python3-venv)"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    fail "$venv has no working Python with pip; remove that folder and call this again"
say "installing $sglang for this machine's $kind (about 3 GB)"
if [ "$kind" = cpu ]; then install_for_cpu; else install "$sglang"; fi
"$venv/bin/python" -c 'import sglang' || fail "SGLang is installed but cannot be imported; its reason stands above"
echo "$now" >"$venv/april-installed"
say "SGLang is installed in $venv"
