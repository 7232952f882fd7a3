#!/bin/sh
# An H200 machine with 16 vCPUs in one go: its profile, what was foretold and not yet run, and 8-bit keys in a process of
# their own, last: their copy beside the full keys takes most of the host's memory.
#
#     benchmarks/gpu/one-gpu.sh OUT [MINUTES]
#
# Steps, folders and what can be set are those of two-gpus.sh; no part of the profile is left out.
export NAME="${NAME:-h200-141g_emr-16vcpu-2}" MODEL="${MODEL:-llada2-mini}" THREADS="${THREADS:-15}" PARTS="${PARTS-}"
export CELLS="${CELLS:---plan missing}" REPLICAS="${REPLICAS:---plan int8}" THEN_MINUTES="${THEN_MINUTES:-2.5}" PROFILE_S="${PROFILE_S:-240}"
exec "$(dirname "$0")/two-gpus.sh" "$1" "${2:-4}"
