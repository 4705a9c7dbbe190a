#!/usr/bin/env bash
# Installs April for development and runs the tests; further arguments go to pytest.
#
#   launch/test.sh          every promise once, in minutes
#   launch/test.sh --all    everything, on SGLang, vLLM, Megatron-core, verl, Slurm and Ray, which are installed beside April, and in a browser
#
# What is skipped is listed at the end with its reason. With --all a missing GPU is the only one; any other fails.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all=false
if [ "${1:-}" = --all ]; then
    all=true
    shift
fi
unset PYTHONDONTWRITEBYTECODE    # where it is set, each of a test's processes compiles all that it imports
"$root/launch/install.sh" dev
if $all; then
    begun=()
    for one in sglang vllm megatron verl; do    # beside each other: all wait for the network and the disk most of the time
        "$root/launch/install-$one.sh" &
        begun+=("$!")
    done
    for one in browser slurm helm prometheus sinks ray store; do "$root/launch/install-$one.sh"; done
    for one in "${begun[@]}"; do wait "$one"; done
fi
cd "$root"
export PATH="$root/.venv/bin:$PATH"

# tests MARKS ARGUMENTS...: what fails does not keep the rest from being run.
plugins=()
tests() { python -m pytest --durations=40 "${plugins[@]}" -m "$@" || failed=$?; }

failed=0
if $all; then
    plugins=(-p tests.refused_skips)
    tests "not (sglang or vllm)" -n 2 --dist loadgroup "$@"
    # By themselves: a server beside a reader that has to share its core with others runs ahead of it.
    # Without arguments: those choose among the tests above.
    [ $# != 0 ] || tests "sglang or vllm"
else
    tests "not full" -n 3 --dist loadgroup "$@"    # two would leave a quarter of two cores idle
fi
exit "$failed"
