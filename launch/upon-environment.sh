#!/usr/bin/env bash
# Read by install-sinks.sh and others: makes an environment of its own upon what .venv has, for packages that few need.
#
# The script that reads it calls make_upon. Tests of what such an environment has are skipped where it is not there.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Modules are compiled when they are first imported, or all of them now where Python may not keep what it compiles.
export PIP_COMPILE=${PIP_COMPILE:-${PYTHONDONTWRITEBYTECODE:+1}}
: "${PIP_COMPILE:=0}"

# make_upon NAME WHAT PACKAGES...: .venv-NAME, installed once.
make_upon() {
    local folder=$root/.venv-$1 what=$2
    shift 2
    if [ -e "$folder/installed" ]; then
        echo "april: $what: already installed in $folder"
        return
    fi
    "$root/.venv/bin/python" -m venv "$folder"
    site "$root/.venv" >"$(site "$folder")/upon.pth"
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check --progress-bar off "$@"
    touch "$folder/installed"
    echo "april: $what: installed in $folder"
}

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
