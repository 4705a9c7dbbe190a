#!/usr/bin/env bash
# Makes .venv-verl in the repository root with verl and April, in which verl's adapter is tested; quick when nothing has
# changed.
#
#   launch/install-verl.sh
#
# Nothing but those tests needs it. verl has an environment of its own because it pins transformers and tensordict.
#
# APRIL_PYTHON        interpreter for a new .venv-verl; otherwise the first one of version 3.11 or newer is taken
# APRIL_VERL          what to install (default verl==0.9.1)
# APRIL_VERL_VENV     where (default .venv-verl in the repository root)
# APRIL_TORCH_INDEX   package index for torch's CPU build alone
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/server-environment.sh"
venv=${APRIL_VERL_VENV:-$root/.venv-verl}
package=${APRIL_VERL:-verl==0.9.1}

# What verl imports and does not name: cachetools and uvicorn.
install_for_cpu() {
    install_torch torch==2.13.0
    install -e "$root[all]" "$package" cachetools uvicorn fastapi
}

make_environment verl verl "$root/pyproject.toml"
