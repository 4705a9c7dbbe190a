#!/usr/bin/env bash
# Makes .venv-megatron in the repository root with Megatron-core and April, from which a run has learner.backend =
# "megatron"; quick when nothing has changed.
#
#   launch/install-megatron.sh
#   .venv-megatron/bin/april run CONFIG --learner.backend megatron --learner.tensor_parallel 2
#
# An extra: nothing else needs it, and its tests run only where it is installed.
#
# APRIL_PYTHON          interpreter for a new .venv-megatron; otherwise the first one of version 3.11 or newer is taken
# APRIL_TORCH           what to install as torch (default torch==2.13.0)
# APRIL_MEGATRON        what to install (default megatron-core==0.16.1)
# APRIL_MEGATRON_VENV   where (default .venv-megatron in the repository root)
# APRIL_TORCH_INDEX     package index for torch's CPU build alone
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/server-environment.sh"
venv=${APRIL_MEGATRON_VENV:-$root/.venv-megatron}
package=${APRIL_MEGATRON:-megatron-core==0.16.1}
torch=${APRIL_TORCH:-torch==2.13.0}

install_for_cpu() {
    install_torch "$torch"
    install -e "$root[all]" "$package"
}

install_for_accelerator() { install "$torch" -e "$root[all]" "$package"; }

make_environment Megatron-core megatron.core "$root/pyproject.toml" "${BASH_SOURCE[0]}"
