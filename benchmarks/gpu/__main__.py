"""Runs cells within a minute budget; each leaves one JSON file, and a table of all stands at the end."""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import PLANS, Cell, parse, plan
from herald_exec.kernels import kept
from herald_pipeline.errors import ConfigError, HeraldError

WORK = {
    "rates": ("benchmarks.gpu.bench", "rates"),
    "pool": ("benchmarks.gpu.pool", "pool"),
    "step": ("benchmarks.gpu.steps", "step"),
    "attention": ("benchmarks.gpu.steps", "attention"),
    "proxy": ("benchmarks.gpu.proxy", "proxy"),
    "run": ("benchmarks.gpu.runs", "run"),
    "ceiling": ("benchmarks.gpu.ceilings", "ceiling"),
    "replicas": ("benchmarks.gpu.replicas", "replicas"),
    "sustained": ("benchmarks.gpu.sustained", "sustained"),
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=sys.modules["benchmarks.gpu"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", help="names, separated by commas")
    parser.add_argument("--plan", help=f"one of {', '.join((*PLANS, 'all'))}")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell begins that would not end within them")
    parser.add_argument("--hardware", help="profile for the estimates of a cell's time")
    parser.add_argument("--model", default="llada2-mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--trace", action="store_true", help="also write Chrome traces")
    args = parser.parse_args(given)
    if not args.minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {args.minutes}")
    return args


def run_cell(bench: Any, cell: Cell) -> dict[str, Any]:
    """A cell's result, or its error; a ceiling runs in a process of its own, as the protocol asks."""
    start = time.perf_counter()
    try:
        if cell.kind == "ceiling" and not bench.args.inside:
            return _apart(bench, cell)
        module, function = WORK[cell.kind]
        result: dict[str, Any] = {"result": getattr(import_module(module), function)(bench, cell)}
    except Exception as problem:
        if not isinstance(problem, HeraldError):
            traceback.print_exc()
        result = {"error": f"{type(problem).__name__}: {problem}"}
    result["seconds"] = time.perf_counter() - start
    bench.free()
    return result


def _apart(bench: Any, cell: Cell) -> dict[str, Any]:
    """The cell in a process of its own; this one gives its memory back first."""
    bench.drop_model()
    kept.release()
    args = bench.args
    command = [sys.executable, "-m", "benchmarks.gpu", "--cells", cell.name, "--out", str(args.out), "--model"]
    command += [args.model, "--device", args.device, "--minutes", str(args.minutes)]
    command += ["--threads", str(args.threads)] if args.threads else []
    start = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "HERALD_BENCH_INSIDE": "1"}, capture_output=True, text=True, check=False
    )
    path = args.out / cell.file
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "result" not in found and "error" not in found:
        found = {"error": f"its process ended with {done.returncode}: {done.stderr[-400:]}"}
    found["seconds"] = time.perf_counter() - start
    return {key: found[key] for key in ("result", "error", "seconds") if key in found}


def summary(cell: Cell, found: dict[str, Any]) -> str:
    """A cell's line: its seconds and its plain numbers."""
    if "error" in found:
        return f"{cell.name:44} {found['seconds']:6.1f} s  FAILED {found['error'][:200]}"
    shown = {}
    for name, value in found["result"].items():
        if name in _HEADLINES and isinstance(value, int | float):
            shown[name] = f"{value:.4g}"
        elif isinstance(value, dict) and "median" in value:
            shown[name] = f"{value['median']:.4g}"
    return f"{cell.name:44} {found['seconds']:6.1f} s  " + ", ".join(f"{k} {v}" for k, v in shown.items())


_HEADLINES = frozenset(
    {
        "throughput_tok_s", "block_time_s", "stall_s", "first_block_time_s", "select_gb_s",
        "gap_between_steps_ms_median", "achieved_over_dram_ceiling", "ceiling_tok_s", "predicted_over_measured",
        "share_of_bound", "gb_s", "dram_read_gb_s", "hbm_copy_gb_s", "h2d_gb_s", "d2h_gb_s", "gemm_tflop_s",
        "forward_over_roofline", "alone_tok_s", "scaling",
        "importance_ms", "pick_ms", "sorted_pick_ms", "slow_down", "slow_down_with_rests",
    }
)  # fmt: skip


def main(given: list[str] | None = None) -> int:
    try:
        return _main(arguments(given))
    except HeraldError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


def _main(args: argparse.Namespace) -> int:
    if (args.cells is None) == (args.plan is None):
        raise ConfigError("give either --cells or --plan")
    cells = plan(args.plan) if args.plan else [parse(name) for name in args.cells.split(",")]
    args.inside = os.environ.get("HERALD_BENCH_INSIDE") == "1"

    import torch

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; --device cpu --model tiny tries the paths")
    from benchmarks.gpu.bench import Bench, facts
    from benchmarks.gpu.estimates import seconds

    args.out.mkdir(parents=True, exist_ok=True)
    bench, begun, lines = Bench(args), time.perf_counter(), []
    with kept.keep_memory():
        _run_all(bench, cells, seconds, facts, lines, begun)
    print("\n".join(lines))
    return 0


def _run_all(
    bench: Any,
    cells: list[Cell],
    seconds: Callable[[Any, Cell], float],
    facts: Callable[[Any], dict[str, Any]],
    lines: list[str],
    begun: float,
) -> None:
    """Cells in turn while the budget lasts; host memory of one is left to the next."""
    args = bench.args
    for cell in cells:
        path = args.out / cell.file
        if path.exists() and "error" not in json.loads(path.read_text()):
            lines.append(f"{cell.name:44} is there already")
            continue
        left = 60 * args.minutes - (time.perf_counter() - begun)
        needed = seconds(bench, cell)
        if needed > left and not args.inside:
            lines.append(f"{cell.name:44} not begun: about {needed:.0f} s, {left:.0f} s are left")
            continue
        found = run_cell(bench, cell)
        document = {"cell": cell.name, "kind": cell.kind, "what": cell.what, **facts(bench), **found}
        document["estimated_s"] = needed
        path.write_text(json.dumps(document, indent=1) + "\n")
        lines.append(summary(cell, found))
        print(lines[-1], file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
