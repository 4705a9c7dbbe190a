#!/usr/bin/env bash
# Starts the broker of a run; workers and the learner connect to it.
#
#   launch/broker.sh CONFIG [--section.key value ...]
#
#   launch/broker.sh configs/quickstart.toml --security.keys KEYS --broker.bind 'tcp://0.0.0.0:5555'
set -euo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
case ${1:-} in -h | --help) usage; exit ;; "" | -*) usage >&2; exit 2 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
command -v april >/dev/null || { echo "april is not installed here; run launch/install.sh first" >&2; exit 1; }
exec april broker "$@"
