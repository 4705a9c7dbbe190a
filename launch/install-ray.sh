#!/usr/bin/env bash
# Puts Ray into .venv-ray, upon what .venv has, for the test of runs on a Ray cluster. A cluster of one's own needs no more than
# `pip install 'april-rl[ray]'` on each node.
#
#   launch/install-ray.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/upon-environment.sh"

make_upon ray Ray --editable "$root[ray]"
