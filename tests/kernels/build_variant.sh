#!/bin/sh
# Builds the kernels with CMake options into a folder of its own and leaves an importable tree in FOLDER/pkg:
#   tests/kernels/build_variant.sh FOLDER [-DHERALD_EMULATE=ON] [-DHERALD_SANITIZE=ON]
# Needs cmake, ninja, cython and cython-cmake in the Python environment named by PYTHON (default: .venv/bin/python).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$1
shift
python=${PYTHON:-$root/.venv/bin/python}
case $python in /*) ;; *) python=$root/$python ;; esac
modules=$("$python" -c 'import cython_cmake, pathlib; print(pathlib.Path(cython_cmake.__file__).parent / "cmake")')
PATH=$(dirname "$python"):$PATH
# Another checkout may have built here before: its cache names other sources.
built=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$folder/CMakeCache.txt" 2>/dev/null || true)
[ -z "$built" ] || [ "$built" = "$root" ] || set -- --fresh "$@"
cmake -G Ninja -S "$root" -B "$folder" -DCMAKE_BUILD_TYPE=Release -DCMAKE_MODULE_PATH="$modules" \
    -DPython_EXECUTABLE="$python" "$@" >"$folder.log" 2>&1 || { tail -30 "$folder.log"; exit 1; }
cmake --build "$folder" >>"$folder.log" 2>&1 || { grep -E 'error|FAILED' "$folder.log" || tail -30 "$folder.log"; exit 1; }
rm -rf "$folder/pkg"
mkdir -p "$folder/pkg/herald_exec"
cp "$root"/herald_exec/__init__.py "$folder/pkg/herald_exec/"
cp -r "$root/herald_exec/kernels" "$folder/pkg/herald_exec/"
cp "$folder"/herald_exec/kernels/_core*.so "$folder/pkg/herald_exec/kernels/"
cp -r "$root/herald_pipeline" "$folder/pkg/"
