#!/usr/bin/env bash
# Starts the learner on one machine, with as many ranks as the configuration says.
#
#   launch/learner.sh CONFIG [CONFIG ...] --connect tcp://HOST:PORT [--section.key value ...]
#
#   launch/learner.sh configs/quickstart.toml --connect tcp://10.0.0.5:5555 --learner.ranks 4
set -euo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
case ${1:-} in -h | --help) usage; exit ;; "" | -*) usage >&2; exit 2 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
command -v april >/dev/null || { echo "April is not installed here; run launch/install.sh first" >&2; exit 1; }
ranks=$(python -P - "$@" <<'PY' | tail -n 1
import sys
from april.config import ConfigError, load

rest = sys.argv[1:]
options = next((at for at, word in enumerate(rest) if word.startswith("-")), len(rest))
configs, rest = rest[:options], rest[options:]
if "--connect" in rest:
    at = rest.index("--connect")
    del rest[at : at + 2]
try:
    print(load(configs, [argument for argument in rest if not argument.startswith("--connect=")], inputs=["model"]).learner.ranks)
except ConfigError as error:
    sys.exit(str(error))
PY
)
exec python -P -m april.learner.launch --nproc-per-node "$ranks" -m april.learner "$@"
