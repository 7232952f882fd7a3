#!/bin/sh
# Every tier's C code (AVX-512 and AMX emulated) under AddressSanitizer and UBSan: the whole check, then fuzzing.
#   tests/kernels/sanitize.sh [SECONDS]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${TMPDIR:-/tmp}/herald-sanitize
mkdir -p "$folder"
"$here/build_variant.sh" "$folder" -DHERALD_EMULATE=ON -DHERALD_SANITIZE=ON
python=${PYTHON:-$here/../../.venv/bin/python}
# -S -E: no editable install of the same name may win over the sanitized build
site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$folder/pkg:$site" OMP_NUM_THREADS=1
cd "$folder/pkg" # not a checkout whose herald_exec would win
"$python" -S -c 'import typer; from herald_exec.kernels.command import kernels; typer.run(kernels)' --check
"$python" -S "$here/fuzz_shapes.py" --seconds "${1:-60}"
