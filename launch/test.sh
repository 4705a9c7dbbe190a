#!/usr/bin/env bash
# Installs April for development and SGLang beside it, and runs the tests; arguments go to pytest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh" dev
"$root/launch/install-sglang.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec python -m pytest --durations=40 "$@"
