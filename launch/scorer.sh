#!/usr/bin/env bash
# Starts one scorer, on any machine that reaches the broker: verifiers alone, where reward.where = "scorer".
#
#   launch/scorer.sh CONFIG --connect tcp://HOST:PORT [--name NAME] [--section.key value ...]
#
# Without --name the scorer is called after its host and process.
set -euo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
case ${1:-} in -h | --help) usage; exit ;; "" | -*) usage >&2; exit 2 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
command -v april >/dev/null || { echo "april is not installed here; run launch/install.sh first" >&2; exit 1; }
case " $* " in *" --name "* | *" --name="*) ;; *) set -- "$@" --name "$(hostname -s)-$$" ;; esac
exec april scorer "$@"
