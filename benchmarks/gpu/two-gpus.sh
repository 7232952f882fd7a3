#!/bin/sh
# A machine with two GPUs in one go: its profile, SDAR's half of Table II on the first GPU, then a HERALD replica on each.
#
#     benchmarks/gpu/two-gpus.sh OUT [MINUTES]
#
# MINUTES (3) are for the cells of Table II; the profile takes up to PROFILE_S seconds (265), the replicas about two
# minutes. Cells lie in runs/NAME and are not run again by a second call, nor are those of benchmarks/results/NAME. OUT
# gets few and small files, after every step: the tables as text, the profile, cells.tgz and raw.tgz with everything.
# Set before the command what differs on your machine: NAME of profile and cells, MODEL, THREADS, CELLS, REPLICAS and the rest below.
set -u
OUT=$1
MINUTES=${2:-3}
NAME=${NAME:-two-gpus} MODEL=${MODEL:-sdar-8b} DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3}
THREADS=${THREADS:-31}                                # all cores but one, which serves the streams
CELLS=${CELLS:-"--plan sdar"} REPLICAS=${REPLICAS:-"--plan replicas"}
MEASURE=${MEASURE:-"--repeats 6 --max-spread 1.0 --pcie 5x16"}
PROFILE_S=${PROFILE_S:-265}
# Of the profile what SDAR's runs are priced by: it has no experts.
PARTS=${PARTS-"memory dram attention gemm sampler proxy copies selection gather launch contention load"}
# Memory of such a machine may grow as it is touched: the control group's limit counts, not the total that is shown.
LIMIT=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
[ "$LIMIT" = max ] || MEASURE="$MEASURE --host-gb $((LIMIT / 1000000000))"
RUNS=runs/$NAME
PROFILE=$RUNS/$NAME.toml

mkdir -p "$OUT" "$RUNS/cells"
for known in "benchmarks/results/$NAME"/*.json; do
    [ ! -f "$known" ] || [ -f "$RUNS/cells/${known##*/}" ] || cp "$known" "$RUNS/cells/"
done
[ ! -f "hw_profiles/$NAME.toml" ] || [ -f "$PROFILE" ] || cp -r "hw_profiles/$NAME.toml" "hw_profiles/$NAME.raw" "$RUNS/"

keep() { # what is there by now, in OUT
    tar czf "$OUT/cells.tgz" -C "$RUNS" cells
    (cd "$RUNS" && tar czf - "$NAME"*.toml "$NAME"*.raw 2>/dev/null) >"$OUT/profile.tgz"
}

bench() { # minutes, cells: their table is printed, and kept
    minutes=$1
    shift
    hardware=
    [ ! -f "$PROFILE" ] || hardware="--hardware $PROFILE"
    # shellcheck disable=SC2086  # options of several words
    "$PYTHON" -m benchmarks.gpu "$@" --model "$MODEL" --device "$DEVICE" --threads "$THREADS" --minutes "$minutes" \
        $hardware --out "$RUNS/cells" 2>>"$OUT/progress.txt" | tee -a "$OUT/tables.txt"
    keep
}

{
    lscpu | grep -E 'Model name|^CPU\(s\)|Socket|NUMA'
    echo "memory.max $LIMIT"
    nvidia-smi topo -m
} >"$OUT/host.txt" 2>&1
if [ ! -f "$PROFILE" ]; then
    # shellcheck disable=SC2046,SC2086
    timeout "$PROFILE_S" "$PYTHON" -m calibration measure --device "$DEVICE" --model "$MODEL" --threads "$THREADS" \
        $MEASURE $([ -z "$PARTS" ] || printf -- '--only %s ' $PARTS) --name "$NAME" --out "$PROFILE" 2>&1 | tee "$OUT/measure.txt"
    keep
fi
# shellcheck disable=SC2086
bench "$MINUTES" $CELLS
# shellcheck disable=SC2086
bench "${THEN_MINUTES:-4}" $REPLICAS
ls -l "$OUT"
