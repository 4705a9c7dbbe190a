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
# APRIL_ALLOW_CUDA=1  install what accelerators need on a machine without one, as when an image is built
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/server-environment.sh"
venv=${APRIL_SGLANG_VENV:-$root/.venv-sglang}
package=${APRIL_SGLANG:-sglang==0.5.23}
cpu_files=$root/launch/sglang-cpu

# The same torch as the learner's on a CPU: SGLang's own pin has no CPU build.
install_for_cpu() {
    install_torch "$(grep '^torch==' "$cpu_files/requirements.txt")"
    install -r "$cpu_files/requirements.txt"
    install --no-deps torchvision==0.28.0 "$package"
    add_modules "$cpu_files/sgl_kernel.py" "$cpu_files/torchvision_operators.py"
}

make_environment SGLang sglang "$cpu_files"/*
