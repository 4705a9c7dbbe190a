#!/usr/bin/env bash
# On a GPU host without a network: installs what launch/gpu/pack.sh has collected, and executes a command that finds it.
#
#   launch/gpu/on_host.sh [--vllm] [--flash] python3 benchmarks/gpu/acceptance.py --minutes 8 --json gpu.json
#
#   --vllm, --flash   put together the pieces in .gpu-vllm, .gpu-flash as well
#
# APRIL_GPU_FOLDER   what was collected (default .gpu in the repository root)
# APRIL_GPU_PIECES   one folder with all pieces, which may have come one after the other (default .gpu-vllm and .gpu-flash)
# APRIL_GPU_SITE     where it is installed (default /tmp/april-site)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${APRIL_GPU_FOLDER:-$root/.gpu}
site=${APRIL_GPU_SITE:-/tmp/april-site}
case ${1:-} in "" | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;; esac

sets=()
while [[ ${1:-} == --vllm || ${1:-} == --flash ]]; do sets+=("${1#--}"); shift; done

compgen -G "$folder/*.whl" >/dev/null ||
    { echo "april: no wheels in $folder; call launch/gpu/pack.sh where there is a network, and bring that folder" >&2; exit 1; }
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$site" "$folder"/*.whl
for part in policy data; do
    [ -e "$root/cache/$part" ] || { mkdir -p "$root/cache" && cp -r "$folder/cache/$part" "$root/cache/"; }
done
if [ -e "$folder/commit" ]; then export APRIL_COMMIT=$(<"$folder/commit"); fi
# The host's packages may be there without compiled modules; each process would compile them anew.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-/tmp/april-pycache}
paths=$site
for set in "${sets[@]}"; do
    pieces=${APRIL_GPU_PIECES:-$root/.gpu-$set}
    if [ ! -e "$site-$set/complete" ]; then
        (cd "$pieces" && sha256sum --quiet -c "$set.sha256") ||
            { echo "april: pieces of $set are missing in $pieces; bring all that launch/gpu/pack.sh $set has made" >&2; exit 1; }
        mkdir -p "$site-$set"
        cat "$pieces/$set".tar.xz.* | python3 -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$site-$set"
        # vLLM has thousands of modules, and a server imports them in three processes, one after the other.
        python3 -m compileall -q -j 0 "$site-$set" >/dev/null || true
        touch "$site-$set/complete"
    fi
    paths+=:$site-$set
    # A compiler's modules, which a file for site-packages would have added.
    [ ! -d "$site-$set/nvidia_cutlass_dsl" ] || paths+=:$site-$set/nvidia_cutlass_dsl/dsl_packages
done
export PYTHONPATH=$paths:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$@"
