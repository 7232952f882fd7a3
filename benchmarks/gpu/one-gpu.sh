#!/bin/sh
# An H200 machine with 16 vCPUs in one go: its profile, runs of every method that it predicts, then 8-bit keys in a
# process of their own (their copy beside the full keys takes most of the host's memory) and the ceilings by protocol.
#
#     benchmarks/gpu/one-gpu.sh OUT [MINUTES]
#
# Steps, folders and what can be set are those of two-gpus.sh; no part of the profile is left out.
export NAME="${NAME:-one-gpu}" MODEL="${MODEL:-llada2-mini}" THREADS="${THREADS:-15}" PARTS="${PARTS-}"
export CELLS="${CELLS:---plan methods}" REPLICAS="${REPLICAS:---plan int8-and-ceilings}" THEN_MINUTES="${THEN_MINUTES:-2}" PROFILE_S="${PROFILE_S:-230}"
exec "$(dirname "$0")/two-gpus.sh" "$1" "${2:-2.5}"
