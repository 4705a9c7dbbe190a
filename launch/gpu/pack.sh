#!/usr/bin/env bash
# Collects what an offline GPU host lacks for April, and checks that April imports and trains with the versions there.
#
#   launch/gpu/pack.sh [vllm] [flash] [--no-check] [--python PATH]
#
# The wheels (CPython 3.12, x86-64) and the quickstart's policy and prompts go to .gpu, which goes to the host with the
# checkout; there launch/gpu/on_host.sh installs them. launch/gpu/host.txt says what the host has.
#
#   vllm            vLLM as well, to .gpu-vllm, in pieces of 57 MB that travel one after the other. For Hopper cards and
#                   dense models: without flash-attention 2, flashinfer, and kernels for other cards and other formats.
#   flash           flash-attn-4 as well, to .gpu-flash, likewise
#   --no-check      only collect
#   --python PATH   check with this interpreter, which has the host's packages; otherwise .venv-gpu is made with them
#
# APRIL_GPU_FOLDER     where everything goes (default .gpu in the repository root)
# APRIL_GPU_EXTRAS     extras of April that are packed (default learner,worker,rewards)
# APRIL_GPU_VLLM       what is packed as vLLM (default vllm==0.24.0, which wants the host's torch)
# APRIL_TORCH_INDEX    package index for torch's CPU build, for .venv-gpu alone
# APRIL_PYTHON         a Python 3.12 for .venv-gpu (default python3.12)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${APRIL_GPU_FOLDER:-$root/.gpu}
extras=${APRIL_GPU_EXTRAS:-learner,worker,rewards}
host=$root/launch/gpu/host.txt
most_mb=40
check=true
sets=()
python=
vllm=${APRIL_GPU_VLLM:-vllm==0.24.0}
piece_mb=57
# What a dense model on a Hopper card does without; the last ones are there, in a version that a dependency refuses.
vllm_without=flashinfer-python,flashinfer-cubin,humming-kernels,nvidia-cudnn-frontend,nvidia-cutlass-dsl,quack-kernels
vllm_without+=,tilelang,tokenspeed-mla,numba,numpy,setuptools,transformers
vllm_files_without="vllm/vllm_flash_attn/_vllm_fa2_C* vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm
    vllm/vllm-rs vllm/_qutlass* vllm/_flashmla* xgrammar/lib/*.a mistral_common/data/tekken_*"

say() { echo "april: $*"; }
fail() { echo "april: $*" >&2; exit 1; }

while [ $# != 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        --no-check) check=false ;;
        vllm | flash) sets+=("$1") ;;
        --python) python=$(realpath -s "${2:?--python needs the path of an interpreter}"); shift ;;
        *) fail "argument '$1' is unknown, see --help" ;;
    esac
    shift
done

# The interpreter that April is installed for: it resolves, downloads and makes the policy.
own=$root/.venv/bin/python
"$own" -m pip --version >/dev/null 2>&1 || fail "there is no .venv with pip; call launch/install.sh first"

collect() {
    local size
    say "collecting what April[$extras] needs beside the host's packages"
    "$own" "$root/launch/gpu/collect.py" "$folder" "april-rl[$extras]"
    say "making the quickstart's policy and prompts, if they are not there"
    (cd "$root" && "$own" -m april.cli make-policy >&2 && "$own" -m april.cli make-data >&2)
    mkdir -p "$folder/cache"
    cp -r "$root/cache/policy" "$root/cache/data" "$folder/cache/"
    git -C "$root" rev-parse HEAD >"$folder/commit" 2>/dev/null || true     # a copy of the tree may lack its history
    size=$(du -sm "$folder" | cut -f1)
    [ "$size" -le "$most_mb" ] || fail "$folder holds $size MB; more than $most_mb MB is too much for one transfer"
    say "$folder holds $(ls "$folder"/*.whl | wc -l) wheels and the policy, $size MB"
}

# pieces SET FILES_WITHOUT ARGUMENTS...: what collect.py finds by these arguments, installed, without the files named, as
# pieces of one compressed archive in .gpu-SET.
pieces() {
    local set=$1 files_without=$2 to=$root/.gpu-$1 work
    shift 2
    work=$(mktemp -d)
    say "collecting $set and what it needs beside the host's packages"
    "$own" "$root/launch/gpu/collect.py" "$work/wheels" "$@"
    "$own" - "$work" <<'PY'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
for wheel in (work / "wheels").glob("*.whl"):  # none has more than what lies in site-packages, but for scripts
    zipfile.ZipFile(wheel).extractall(work / "site")
PY
    (cd "$work/site" && rm -rf $files_without)
    mkdir -p "$to"
    rm -f "$to/$set".*
    say "compressing $(du -sm "$work/site" | cut -f1) MB, which takes minutes"
    tar -C "$work/site" --sort=name -cf - . | xz -4 -T0 | split -d -b "${piece_mb}000000" - "$to/$set.tar.xz."
    (cd "$to" && sha256sum "$set".tar.xz.* >"$set.sha256")
    rm -rf "$work"
    say "$to holds $(ls "$to/$set".tar.xz.* | wc -l) pieces, $(du -sm "$to" | cut -f1) MB"
}

# Newer ones of xgrammar want a newer tvm-ffi than vLLM does.
collect_vllm() { pieces vllm "$vllm_files_without" "$vllm" 'xgrammar<0.2.2' --without "$vllm_without"; }

collect_flash() {
    pieces flash "nvidia_cutlass_dsl/dsl_packages/iket tvm_ffi/include tvm_ffi/3rdparty" \
        'flash-attn-4>=4.0.0b30,<4.1' nvidia-cutlass-dsl-libs-cu13 --without nvidia-cutlass-dsl-libs-cu12
}

# .venv-gpu: the host's versions of what April imports, with torch's CPU build where an index for it is given.
make_environment() {
    local venv=$root/.venv-gpu
    if [ ! -e "$venv/april-installed" ]; then
        "${APRIL_PYTHON:-python3.12}" -m venv "$venv" || fail "no Python 3.12 was found; set APRIL_PYTHON, or give --python or --no-check"
        say "making .venv-gpu with the host's versions"
        "$venv/bin/python" -m pip install -qq "torch==$(sed -n 's/^torch==//p' "$host")" \
            ${APRIL_TORCH_INDEX:+--index-url "$APRIL_TORCH_INDEX"}
        grep -E '^(accelerate|aiohttp|fsspec|hypothesis|jinja2|msgpack|numpy|prometheus-client|psutil|pyarrow|pytest|pytest-timeout|pytest-xdist|pyyaml|rich|safetensors|sympy|tokenizers|transformers)(==|$)' \
            "$host" >"$venv/host.txt"
        "$venv/bin/python" -m pip install -qq -r "$venv/host.txt"
        touch "$venv/april-installed"
    fi
    python=$venv/bin/python
}

# What the host will do first, here: install without an index, import, and train a few steps of the quickstart's task.
rehearse() {
    local site
    site=$(mktemp -d)
    say "checking with $("$python" --version), torch $("$python" -c 'import torch; print(torch.__version__)')"
    PATH=$(dirname "$python"):$PATH APRIL_GPU_FOLDER=$folder APRIL_GPU_SITE=$site "$root/launch/gpu/on_host.sh" \
        python3 "$root/benchmarks/gpu/start_run.py" --device cpu --tiny --seconds 100 --out "$site/rows.jsonl" >"$site/log" 2>&1 ||
        { tail -n 40 "$site/log" >&2; fail "April does not train with the host's versions; the end of its log stands above"; }
    if grep -q ': failed"' "$site/rows.jsonl"; then cat "$site/rows.jsonl" >&2; fail "an attempt failed"; fi
    rm -rf "$site"
    say "April trains with the host's versions"
}

# rehearse_set SET PROGRAM: whether a Python program that imports from it runs with the host's versions.
rehearse_set() {
    local site
    site=$(mktemp -d)
    say "checking that $1 can be imported with the host's versions"
    PATH=$(dirname "$python"):$PATH APRIL_GPU_FOLDER=$folder APRIL_GPU_SITE=$site "$root/launch/gpu/on_host.sh" "--$1" \
        python3 -c "$2" >"$site/log" 2>&1 || { tail -n 20 "$site/log" >&2; fail "$1 cannot; the end of its log stands above"; }
    rm -rf "$site" "$site-$1"
    say "it can"
}
declare -A imports=(
    [vllm]='import vllm.v1.engine.async_llm, vllm.v1.worker.gpu_worker, vllm.v1.attention.backends.flash_attn'
    [flash]='import flash_attn.cute'
)

collect
for set in "${sets[@]}"; do "collect_$set"; done
if $check; then
    [ -n "$python" ] || make_environment
    rehearse
    for set in "${sets[@]}"; do rehearse_set "$set" "${imports[$set]}"; done
else
    say "not checked with the host's versions (--no-check)"
fi
