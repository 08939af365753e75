#!/bin/sh
# What a machine with a GPU should show, in under six minutes: the suites that need the device, then the
# speed of llamas of 7B, 1B and 33B shape (random weights made there; nothing is downloaded). It prints
# tables, and one JSON document as its last line. Needs torch 2.11 or newer and transformers; the suites
# need pytest and hypothesis as well, and are left out where these are missing.
#
#   sh scripts/device_check.sh           on a GPU
#   sh scripts/device_check.sh --toy     the same script at toy size, on any machine, in seconds
#
#   PYTHON         the interpreter (default: .venv/bin/python, else python3)
#   SUITE_SECONDS  the most that the suites may take (default: 110)
#   BENCH_SECONDS  after which no part of the measurements starts (default: 200)
#   SUITE          0 leaves the suites out
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
say() { printf 'device_check: %s\n' "$*"; }

"$PYTHON" - <<'CHECK'
import sys
try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"device_check: {error}; install torch 2.11 or newer, transformers and safetensors")
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 11):
    sys.exit(f"device_check: torch {torch.__version__}: expected 2.11 or newer")
print(f"device_check: torch {torch.__version__}, transformers {transformers.__version__}, CUDA {torch.version.cuda}")
CHECK

PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
suite=passed
if [ "${SUITE:-1}" = 0 ]; then
    suite='left out'
elif ! "$PYTHON" -c 'import pytest, hypothesis' 2>/dev/null; then
    say 'the suites are left out: they need pytest and hypothesis'
    suite='left out'
else
    say 'suites'
    only=cuda
    if [ "${1:-}" = --toy ]; then only=torch-static; fi
    status=0
    timeout "${SUITE_SECONDS:-110}" "$PYTHON" -m pytest -q -r fE -p no:cacheprovider -k "$only" \
        tests/conformance tests/torch_backend/test_graphs.py || status=$?
    if [ "$status" = 124 ]; then suite='cut short'; elif [ "$status" != 0 ]; then suite=failed; fi
fi
say "suites: $suite"

"$PYTHON" -m portadraft.bench.devices --seconds "${BENCH_SECONDS:-200}" --suite "$suite" "$@"
[ "$suite" = passed ] || [ "$suite" = 'left out' ]
