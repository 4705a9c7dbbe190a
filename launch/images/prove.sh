#!/usr/bin/env bash
# Builds an image from nothing, on Debian as root, and runs a short quickstart in it as its own user, on the CPU.
#
#   launch/images/prove.sh            the image for CPUs
#   launch/images/prove.sh cuda       that for NVIDIA accelerators; no accelerator is needed
#
# Its base is made here by mmdebstrap instead of being fetched by its digest; every instruction of the recipe is executed by
# buildah, without a daemon. Settings of this machine for apt and pip are lent to the build, and are not in the image.
#
# APRIL_LEND     further files and folders that the build may read, as a mirror of packages on this machine's disk
# TORCH_INDEX    as in the recipe
# SERVER         as in the recipe; none where it is not given
# STORAGE_DRIVER  vfs, or overlay where the kernel has it: with vfs each layer takes the disk of all before it
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
recipe=${1:-cpu}
case $recipe in
    cpu) given="TORCH_INDEX=${TORCH_INDEX:-}" ;;
    cuda) given=SERVER=${SERVER:-none} ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; use cpu or cuda, see --help" >&2; exit 1 ;;
esac
if ! { command -v mmdebstrap && command -v buildah; } >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --no-install-recommends mmdebstrap buildah >/dev/null
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
builder() { buildah --root "$work/images" --runroot "$work/run" --storage-driver "${STORAGE_DRIVER:-vfs}" "$@"; }

began=$SECONDS
mmdebstrap --quiet --variant=minbase bookworm "$work/base.tar"
base=$(builder from scratch)
builder add --quiet "$base" "$work/base.tar" / >/dev/null
builder commit --quiet "$base" april-base >/dev/null
builder rm "$base" >/dev/null
rm "$work/base.tar"
echo "april: the base took $((SECONDS - began)) s"

lent=()
for path in /etc/apt/apt.conf.d /usr/local/share/ca-certificates /etc/pip.conf /root/.config/pip ${APRIL_LEND:-}; do
    [ ! -e "$path" ] || lent+=(--volume "$path:$path:ro")
done
began=$SECONDS
builder build --isolation chroot --format docker --network host "${lent[@]}" --build-arg BASE=localhost/april-base \
    --build-arg "$given" --file "$root/launch/images/$recipe.Dockerfile" --tag "april:$recipe" "$root"
echo "april: the image took $((SECONDS - began)) s"

began=$SECONDS
container=$(builder from "april:$recipe")
for server in sglang vllm; do
    [ "$given" != "SERVER=$server" ] || builder run --isolation chroot "$container" -- \
        "/opt/april/.venv-$server/bin/python" -c "import $server, torch; print('$server', $server.__version__, 'torch', torch.__version__)"
done
builder run --isolation chroot "$container" -- april quickstart --schedule.max_steps 3
builder run --isolation chroot "$container" -- sh -c 'test "$(id -u)" = 1000 && test -s runs/quickstart/summary.json'
echo "april: a quickstart in it took $((SECONDS - began)) s"
