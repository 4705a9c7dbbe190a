#!/usr/bin/env bash
# Puts the tools that figures go to into .venv-sinks, upon what .venv has: MLflow and its server, trackio, SwanLab.
#
#   launch/install-sinks.sh
#
# Their tests are left out where it is not there.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.venv-sinks
if [ -e "$folder/installed" ]; then
    echo "april: the tools are already installed in $folder"
    exit
fi
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"$root/.venv/bin/python" -m venv "$folder"
site "$root/.venv" >"$(site "$folder")/upon.pth"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --progress-bar off \
    --editable "$root[mlflow,swanlab,trackio]" mlflow
touch "$folder/installed"
echo "april: MLflow, trackio and SwanLab are installed in $folder"
