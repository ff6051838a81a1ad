#!/usr/bin/env bash
# Make an environment of requirements/environments.txt: make_env.sh NAME [FOLDER], by default in .venvs/NAME.
# PYTHON: the interpreter (3.11 or newer). TORCH_INDEX: address of a package index with CPU builds of torch.
set -euo pipefail
name=${1:?name of the environment}
venv=${2:-.venvs/$name}
python=${PYTHON:-python3}
constraints=requirements/constraints-$name.txt
say() { printf '== %s\n' "$*"; }

row=$(grep -E "^$name *\|" requirements/environments.txt) || {
    echo "error: no environment '$name'; requirements/environments.txt has: $(sed -n 's/^\([a-z][^ |]*\) *|.*/\1/p' requirements/environments.txt | xargs)" >&2
    exit 2
}
field() { cut -d'|' -f"$1" <<<"$row" | xargs; }
torch_row=$(field 2) bare=$(field 3) dists=$(field 4)
torch_version=${torch_row%+cpu}
command -v "$python" >/dev/null || { echo "error: no '$python' here; name a Python 3.11 or newer: make env PYTHON=..." >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old; powertrain needs Python 3.11 or newer: make env PYTHON=python3.11" >&2
    exit 2
}
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    say "python's venv module is missing: installing python3-venv with apt-get"
    apt-get update -qq && apt-get install -y -qq python3-venv
fi

say "virtual environment in $venv ($("$python" --version))"
rm -f "$venv/.made"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q --upgrade -c "$constraints" pip hatchling editables

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch_version')" 2>/dev/null; then
    say "torch $torch_version is there already"
elif [ "$torch_row" = "$torch_version" ] && has_gpu; then
    say "a GPU is here: torch $torch_version with CUDA"
    pip install -q "torch==$torch_version"
elif [ "$(uname -sm)" = "Linux x86_64" ]; then
    # The plain name would bring gigabytes of CUDA packages; the local version names the CPU build and nothing else.
    say "no GPU here, or none wanted: torch $torch_version, CPU build"
    pip install -q -c "$constraints" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$torch_version+cpu" || {
        echo "error: pip finds no CPU build of torch. Give the index that has it (its address stands on PyTorch's" >&2
        echo "       'Start Locally' page under CPU): make env TORCH_INDEX=<address>, or set PIP_EXTRA_INDEX_URL." >&2
        exit 2
    }
else
    say "torch $torch_version (this platform's builds are for the CPU)"
    pip install -q "torch==$torch_version"
fi

say "packages of the engines, the tests and the docs"
pip install -q -c "$constraints" -r "requirements/$name.txt"
if [ -n "$bare" ]; then
    say "without what they depend on: $bare"
    # shellcheck disable=SC2086 # a list of names
    pip install -q --no-deps -c "$constraints" $bare
fi
say "powertrain's own dists, editable"
args=()
for dist in $dists; do args+=(-e "./$dist"); done
pip install -q --no-deps --no-build-isolation "${args[@]}"
say "done: $venv/bin/powertrain; \`source $venv/bin/activate\` puts it on your PATH"
