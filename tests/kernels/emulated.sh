#!/bin/sh
# Older and newer processors than this one (`make test-emulated`; needs qemu-user, takes minutes):
# 1. under qemu: a Haswell picks avx2, a Nehalem portable, both compute; forcing avx512 there is a sentence and exit 1;
# 2. AVX-512, AVX-512-BF16 and AMX in plain C: the whole check on each, and the tests of selection whose results it does not
#    compare: bits for any number of threads, what is not read (the other tiers run natively in the test suite).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
command -v qemu-x86_64 >/dev/null || { echo "qemu-x86_64 is missing; install the package qemu-user" >&2; exit 1; }
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

compute='
import sys
import numpy as np
from herald_exec import kernels
from herald_exec.kernels.checking import Case, check_topk, run_case
from herald_pipeline.errors import HeraldError
try:
    tier = kernels.active_tier()
except HeraldError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
for case in (Case((0, 1, 97, 300), (5, 1, 9, 30)), Case((97, 300), (9, 30), x=4)):
    result = run_case(case)
    assert not result.problems, result.problems
print(tier)
'
expect() { # processor, expected tier
    found=$(qemu-x86_64 -cpu "$1" "$python" -c "$compute")
    [ "$found" = "$2" ] || { echo "$1 ran $found instead of $2" >&2; exit 1; }
    echo "$1: $found"
}
expect Haswell avx2
expect Nehalem portable
if message=$(HERALD_CPU=avx512 qemu-x86_64 -cpu Haswell "$python" -c "$compute" 2>&1); then
    echo "HERALD_CPU=avx512 was accepted on a Haswell" >&2
    exit 1
fi
case $message in *Traceback*) echo "$message" >&2; exit 1 ;; *HERALD_CPU=avx512*) printf "%s\n" "$message" | grep HERALD_CPU ;; *) exit 1 ;; esac

folder=${TMPDIR:-/tmp}/herald-emulated
mkdir -p "$folder"
"$here/build_variant.sh" "$folder" -DHERALD_EMULATE=ON
site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
cd "$folder/pkg" # not a checkout whose herald_exec would win
PYTHONPATH="$folder/pkg:$site" "$python" -S -c '
import sys
from herald_exec.kernels.checking import check_tiers
for row in check_tiers(["avx512", "avx512bf16", "amx"]):
    print(row["tier"], "emulated:", row["cases"], "cases,", row["swaps"], "near-ties, problems", row["problems"])
    if row["problems"]:
        sys.exit(1)
'
PYTHONPATH="$folder/pkg:$site" "$python" -S -m pytest -q -p no:cacheprovider "$here/test_selection.py" \
    -k '(avx512 or amx) and not definition'
