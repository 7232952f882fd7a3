"""Speed of the CPU kernels at several contexts, one JSON file each, with where and when it was measured.

    python benchmarks/bench_kernels.py --out benchmarks/results --context 4096 --context 32768
    python benchmarks/bench_kernels.py --out /tmp/k --pool-gib 4 --repeats 9 --note "idle machine"

Every number is a median of interleaved repetitions, and every ratio is taken inside one repetition.
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

from rich.console import Console

from herald_exec import kernels
from herald_exec.kernels.benchmark import bench_kernels, show_bench
from herald_exec.kernels.measuring import cpu_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pool-gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    text = Console(width=150)
    options.out.mkdir(parents=True, exist_ok=True)
    for context in options.context or [32768]:
        result = bench_kernels(
            context=context,
            threads=options.threads,
            pool_gib=options.pool_gib,
            repeats=options.repeats,
            with_torch=not options.no_torch,
        )
        result["provenance"] = {
            "kind": "measured",
            "cpu": cpu_model(),
            "kernel": platform.release(),
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tier": kernels.active_tier(),
            "note": options.note,
        }
        show_bench(result, text)
        name = f"kernels_{context}_{result['capabilities']['threads']}t.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
