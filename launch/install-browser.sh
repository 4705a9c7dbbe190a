#!/usr/bin/env bash
# Installs Debian's Chromium, in which the dashboard is tested, where it can: as root, on a system with apt.
#
#   launch/install-browser.sh
#
# Without it the tests in a browser are skipped.
set -euo pipefail

browser=/usr/bin/chromium

if [ -x "$browser" ]; then
    echo "april: $browser is already installed"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "april: installing $browser"
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null; then
        echo "april: apt-get could not install chromium; the tests in a browser are skipped" >&2
    fi
else
    echo "april: $browser is not there, and only root can install it (apt-get install chromium);" \
        "the tests in a browser are skipped" >&2
fi
