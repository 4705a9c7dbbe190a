#!/usr/bin/env bash
# Installs April for development and runs its tests; arguments go to pytest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh" dev
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec python -m pytest "$@"
