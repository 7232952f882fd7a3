"""Speed of the CPU kernels at several contexts, one JSON file each, with where and when it was measured.

    python benchmarks/bench_kernels.py --out benchmarks/results --context 4096 --context 32768
    python benchmarks/bench_kernels.py --out /tmp/k --pool-gib 4 --repeats 9 --note "idle machine"
    python benchmarks/bench_kernels.py --out /tmp/k --tune 20 --seconds 25 --repeats 40

Every number is a median of interleaved repetitions, and every ratio is taken inside one repetition.
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

from rich.console import Console

from herald_exec import kernels
from herald_exec.kernels.benchmark import bench_kernels
from herald_exec.kernels.choosing import measure_tunings
from herald_exec.kernels.measuring import KernelBench, cpu_model
from herald_exec.kernels.text import show_bench
from herald_exec.kernels.tuning import Tuning


def tuned(context: int, threads: int | None, pool_gib: float, seconds: float) -> dict[str, Tuning]:
    """The fastest tunings here, found at one context."""
    used = threads or kernels.capabilities()["threads"]
    bench = KernelBench(context, used, pool_gib)
    try:
        return measure_tunings(bench, used, seconds)
    finally:
        kernels.set_tier(None)
        bench.pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pool-gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.0, help="of each context, in place of all repeats")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of choosing the fastest ways first")
    parser.add_argument("--no-torch", action="store_true", help="else torch is measured at the largest context")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    text = Console(width=150)
    options.out.mkdir(parents=True, exist_ok=True)
    contexts = options.context or [32768]
    tunings = tuned(max(contexts), options.threads, options.pool_gib, options.tune) if options.tune else None
    for use, tuning in (tunings or {}).items():
        text.print(f"{use}: {tuning}")
    for context in contexts:
        result = bench_kernels(
            context=context,
            threads=options.threads,
            pool_gib=options.pool_gib,
            repeats=options.repeats,
            with_torch=not options.no_torch and context == max(contexts),
            seconds=options.seconds,
            tunings=tunings,
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
