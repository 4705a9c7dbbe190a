#!/usr/bin/env bash
# Brings Slurm and what makes network namespaces, for the tests of `april launch`; does nothing where they are.
#
#   launch/install-slurm.sh
#
# Needs root and Debian's packages. Elsewhere it says so, and those tests are skipped.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
if type slurmctld slurmd munged ip >/dev/null 2>&1; then
    echo "april: Slurm is already installed"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --no-install-recommends slurm-wlm munge iproute2 >/dev/null
    echo "april: Slurm is installed"
else
    echo "april: Slurm is not here and this is not Debian's root, so its tests are skipped"
fi
