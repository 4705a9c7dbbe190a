#!/usr/bin/env bash
# Puts s3fs and a server that speaks S3, moto's, into .venv-store, upon what .venv has: what tests of object stores need.
# Whoever uses a store installs `april-rl[s3]` or `april-rl[gcs]` instead.
#
#   launch/install-store.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/upon-environment.sh"

# s3fs first: it takes few versions of what the server takes any of.
make_upon store "s3fs and a server of S3" "s3fs>=2025.3,<2027" "moto[server]>=5.1,<6"
