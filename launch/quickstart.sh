#!/usr/bin/env bash
# Installs April and calls `april quickstart`: makes a small policy and its prompts, trains it on this machine, and prints
# the run's table.
#
#   launch/quickstart.sh [--section.key value ...]      overrides of configs/quickstart.toml
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;; esac

"$root/launch/install.sh" all
cd "$root"
export PATH="$root/.venv/bin:$PATH"
exec april quickstart "$@"
