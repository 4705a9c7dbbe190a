#!/usr/bin/env bash
# On a GPU host without a network: installs what launch/gpu/pack.sh has collected, and executes a command that finds it.
#
#   launch/gpu/on_host.sh [--vllm] python3 benchmarks/gpu/acceptance.py --minutes 8 --json gpu.json
#
#   --vllm   put together the pieces in .gpu-vllm as well
#
# APRIL_GPU_FOLDER        what was collected (default .gpu in the repository root)
# APRIL_GPU_VLLM_FOLDER   the pieces of vLLM, which may have come one after the other (default .gpu-vllm in that root)
# APRIL_GPU_SITE          where it is installed (default /tmp/april-site)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${APRIL_GPU_FOLDER:-$root/.gpu}
pieces=${APRIL_GPU_VLLM_FOLDER:-$root/.gpu-vllm}
site=${APRIL_GPU_SITE:-/tmp/april-site}
case ${1:-} in "" | -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;; esac

with_vllm=false
if [ "$1" = --vllm ]; then with_vllm=true; shift; fi

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
if $with_vllm && [ ! -e "$site-vllm/complete" ]; then
    (cd "$pieces" && sha256sum --quiet -c vllm.sha256) ||
        { echo "april: pieces of vLLM are missing in $pieces; bring all that launch/gpu/pack.sh vllm has made" >&2; exit 1; }
    mkdir -p "$site-vllm"
    cat "$pieces"/vllm.tar.xz.* | python3 -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$site-vllm"
    rm -rf "$site-vllm/opentelemetry/exporter"  # which wants a protobuf of its own; vLLM does without
    # vLLM has thousands of modules, and a server imports them in three processes, one after the other.
    python3 -m compileall -q -j 0 "$site-vllm" >/dev/null || true
    touch "$site-vllm/complete"
fi
if $with_vllm; then site=$site:$site-vllm; fi
export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$@"
