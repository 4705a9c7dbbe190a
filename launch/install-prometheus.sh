#!/usr/bin/env bash
# Puts Debian's Prometheus into .venv-prometheus, for the tests of the dashboard for Grafana and of the alert rules; nothing
# is started, and nothing is installed elsewhere.
#
#   launch/install-prometheus.sh
#
# Needs apt. Elsewhere it says so, and those tests are skipped.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-prometheus
if [ -x "$folder/usr/bin/prometheus" ]; then
    echo "april: Prometheus is already installed"
elif ! command -v apt-get >/dev/null; then
    echo "april: there is no apt, so the tests of Prometheus are skipped"
else
    mkdir -p "$folder"
    cd "$folder"
    if apt-get download -qq prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download -qq prometheus; } >/dev/null 2>&1; then
        dpkg-deb --extract prometheus_*.deb .
        rm prometheus_*.deb
        echo "april: $(usr/bin/promtool --version | head -n 1) is in $folder"
    else
        echo "april: apt has no prometheus, so its tests are skipped"
    fi
fi
