#!/usr/bin/env bash
# Puts the tools that figures go to into .venv-sinks, upon what .venv has: MLflow and its server, trackio, SwanLab.
#
#   launch/install-sinks.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/upon-environment.sh"

make_upon sinks "MLflow, trackio and SwanLab" --editable "$root[mlflow,swanlab,trackio]" mlflow
