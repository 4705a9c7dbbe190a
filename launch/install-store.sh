#!/usr/bin/env bash
# Puts s3fs and a server that speaks S3, moto's, into .venv-store, upon what .venv has: what tests of object stores need.
#
#   launch/install-store.sh
#
# Their tests are left out where it is not there. Whoever uses a store installs `april-rl[s3]` or `april-rl[gcs]` instead.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.venv-store
if [ -e "$folder/installed" ]; then
    echo "april: the object store is already installed in $folder"
    exit
fi
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"$root/.venv/bin/python" -m venv "$folder"
site "$root/.venv" >"$(site "$folder")/upon.pth"
# s3fs first: it takes few versions of what the server takes any of.
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --progress-bar off \
    "s3fs>=2025.3,<2027" "moto[server]>=5.1,<6"
touch "$folder/installed"
echo "april: s3fs and a server of S3 are installed in $folder"
