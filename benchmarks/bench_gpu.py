"""The executor on a GPU, cell by cell: rates, one step split by part, whole runs. Each cell leaves one JSON file.

    python benchmarks/bench_gpu.py --cells rates,step:herald:80,run:dense:16 --minutes 4
    python benchmarks/bench_gpu.py --cells run:herald:80,run:herald:80:exact_layers_on=gpu
    make bench-gpu

A cell whose file exists is not run again; no cell begins behind the minute budget; a failing cell leaves its error in
its file and the others go on. Weights are random and prompts synthetic: experts and selections scatter more than those
of a trained model. Nothing here is fitted or assumed; floors are bytes or operations over rates measured in ``rates``.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from herald_exec import Options, decode
from herald_exec import kernels as cpu_kernels
from herald_exec.cuda.actions import DeviceActions
from herald_exec.cuda.forward import launch_shape
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.lanes import Field, bucket
from herald_exec.execution import _session
from herald_exec.models import random_model
from herald_exec.policy import PlannedPolicy
from herald_exec.requests import DecodeRequest
from herald_pipeline import capacity, catalogue
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.pipeline import build, scanned_bytes
from herald_pipeline.steps import FixedSteps
from herald_pipeline.trace import write_chrome

CELLS = (
    "rates",
    "step:herald:80",
    "step:dense:38",
    "attention:80",
    "run:dense:38",
    "run:dense:80",
    "run:herald:80",
    "run:herald:80:exact_layers_on=gpu",
)
GB = 1e9


class Bench:
    """What cells share: arguments, and the model once it has been drawn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda")
        self._model = None

    @property
    def model(self):
        """Random weights in bf16 on the device."""
        if self._model is None:
            shape = catalogue.get(self.args.model)
            self._model = random_model(shape, seed=0, device=self.device, dtype=torch.bfloat16)
        return self._model

    def requests(self, batch: int) -> list[DecodeRequest]:
        """Requests of one length."""
        prompt = tuple(i % 1000 + 2 for i in range(self.args.context))
        return [DecodeRequest(i, prompt, 32 * self.args.blocks) for i in range(batch)]

    def policy(self) -> PlannedPolicy:
        """T steps a block, by confidence."""
        block = catalogue.get(self.args.model).block_length
        return PlannedPolicy(FixedSteps(self.args.steps, block), Sampler(mask_token_id=self.model.shape.mask_token_id))


def timed_ms(work, repeats: int = 10, warm: int = 3) -> list[float]:
    """Device milliseconds of each repeat."""
    for _ in range(warm):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        work()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def rates(bench: Bench) -> dict:
    """Raw rates of this machine, measured beside the cells that they bound."""
    size = 2 << 30
    threads = bench.args.threads
    found = {"dram_read_gb_s": cpu_kernels.read_bandwidth_gb_s(8 << 30, threads)}
    big = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    other = torch.empty_like(big)
    found["hbm_copy_gb_s"] = 2 * size / median(timed_ms(lambda: other.copy_(big))) / 1e6
    found["hbm_read_gb_s"] = size / median(timed_ms(lambda: big.view(torch.float32).sum())) / 1e6
    pinned = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True)
    part = big[: pinned.numel()]
    found["h2d_gb_s"] = pinned.numel() / median(timed_ms(lambda: part.copy_(pinned, non_blocking=True))) / 1e6
    found["d2h_gb_s"] = pinned.numel() / median(timed_ms(lambda: pinned.copy_(part, non_blocking=True))) / 1e6
    a, b = (torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16) for _ in "ab")
    found["gemm_tflop_s"] = 2 * 8192**3 / median(timed_ms(lambda: a @ b)) / 1e9
    return found


def open_step(bench: Bench, method: str, batch: int):
    """A session whose device pools hold synthetic KV, ready for steps; host pools are mapped and never touched."""
    pipeline = build(bench.model.shape, method)
    size = capacity.request_size(pipeline, bench.args.context + 2 * pipeline.settings.block_length)
    options = Options(batch=batch, synthetic_kv=True, ignore_eos=True, threads=bench.args.threads)
    session = _session(pipeline, bench.model, size, bench.policy(), options)
    for name in ("full", "exact", "sparse"):
        store = session.pools.stores.get(name)
        if store is not None:
            for layer in range(session.num_layers):
                if store.holds(layer):
                    for part in store.layer(layer):
                        part.normal_()
    return session, DeviceActions(session)


def fill_lanes(session, actions, batch: int, context: int, drafting: bool) -> int:
    """The table of a full batch of open rows at block 1, all masked."""
    settings, table = session.pipeline.settings, actions.forward.table
    lanes = bucket(batch * (2 if drafting else 1))
    host = table._host[0]
    host.zero_()
    host[[Field.FULL_STORE_ROW, Field.SPARSE_STORE_ROW, Field.OUT_ROW]] = -1
    slots = torch.arange(batch, dtype=torch.int32).repeat(2 if drafting else 1)
    count = len(slots)
    host[Field.SLOT, :count] = host[Field.FULL_ROW, :count] = host[Field.SPARSE_ROW, :count] = slots
    host[Field.START, :count] = host[Field.FULL_LENGTH, :count] = context
    tail = settings.block_length if session.double_buffered else 0
    host[Field.SPARSE_LENGTH, :count] = settings.selected_tokens(context) + tail
    host[Field.IS_DRAFT, batch:count] = 1
    if drafting:
        host[Field.OUT_ROW, batch:count] = slots[batch:]
    table._turn = 0
    table.send()
    session.state.masked.fill_(value=True)
    return lanes


def step(bench: Bench, method: str, batch: int) -> dict:
    """One denoise step: graph, launches by name, LM head; and its roofline sum."""
    session, actions = open_step(bench, method, batch)
    found: dict = {"batch": batch, "method": method, "pool_bytes": session.pools.num_bytes}
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for drafting in (False, True) if session.pipeline.template.draft_step is not None else (False,):
            lanes = fill_lanes(session, actions, batch, bench.args.context, drafting)
            start = time.perf_counter()
            actions.forward.capture(lanes)
            found[f"capture_s_{lanes}"] = time.perf_counter() - start
            times = timed_ms(lambda n=lanes: actions.forward(n), repeats=8, warm=2)
            found["draft_forward_ms" if drafting else "forward_ms"] = {"median": median(times), "all": times}
        lanes = fill_lanes(session, actions, batch, bench.args.context, False)
        normed = actions.forward(lanes)
        total = batch * session.block_length
        for share in (1.0, 0.5):
            count = int(total * share)
            head = timed_ms(lambda n=count: actions.acceptance.head(normed[:n]), repeats=6, warm=2)
            found[f"head_ms_{count}"] = median(head)
        try:
            found["kernels"] = profile(lambda: actions.forward(lanes))
            if session.pipeline.template.draft_step is not None:
                lanes = fill_lanes(session, actions, batch, bench.args.context, True)
                found["draft_kernels"] = profile(lambda: actions.forward(lanes))
        except RuntimeError as problem:
            found["kernels"] = f"the profiler does not work here: {problem}"
    found["roofline"] = roofline(bench, session, batch)
    floor = found["roofline"].get("sum_ms")
    if floor:
        found["forward_over_roofline"] = found["forward_ms"]["median"] / floor
    session.pools.close()
    actions.close()
    return found


def profile(work) -> list[dict]:
    """Milliseconds of each kernel in three calls, per call, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
    rows = [(e.key, e.device_time_total / 3e3, e.count / 3) for e in seen.key_averages() if e.device_time_total > 0]
    rows.sort(key=lambda row: -row[1])
    return [{"name": name[:120], "ms": ms, "count": count} for name, ms, count in rows[:24]]


def roofline(bench: Bench, session, batch: int) -> dict:
    """Sum over parts of max(bytes / read rate, operations / GEMM rate), with the rates of the cell ``rates``."""
    path = bench.args.out / "rates.json"
    known = json.loads(path.read_text()).get("result", {}) if path.exists() else {}
    if "hbm_copy_gb_s" not in known:
        return {"missing": "run the cell rates first"}
    shape, settings = session.model.shape, session.pipeline.settings
    tokens, moe = batch * session.block_length, shape.moe
    kv_entries = 0
    for layer in range(shape.num_layers):
        sparse = "sparse" in session.pools.stores and session.pools.stores["sparse"].holds(layer)
        prefix = settings.selected_tokens(bench.args.context) + settings.block_length if sparse else bench.args.context
        kv_entries += batch * (prefix + settings.block_length)
    kv_bytes = kv_entries * shape.kv_bytes_per_token_layer(settings.kv_dtype)
    attention_flops = 4 * kv_entries * settings.block_length * shape.num_heads * shape.head_dim
    weight_bytes = shape.weight_bytes() - shape.vocab_size * shape.hidden_size * 4
    expert_bytes = 0.0
    if moe is not None:
        # Every expert is hit at these batches; what few tokens would spare is not taken off.
        expert_bytes = shape.num_moe_layers * moe.num_experts * shape.expert_params * 2
    matmul_flops = 2 * tokens * (shape.active_params - shape.vocab_size * shape.hidden_size)
    # A step reads almost only; the faster of the two measured rates is the stricter floor.
    hbm = max(known["hbm_copy_gb_s"], known["hbm_read_gb_s"]) * 1e6
    gemm = known["gemm_tflop_s"] * 1e9
    parts = {
        "attention_ms": max(kv_bytes / hbm, attention_flops / gemm),
        "matmuls_ms": max(weight_bytes / hbm, matmul_flops / gemm),
    }
    return {
        **parts,
        "sum_ms": sum(parts.values()),
        "kv_bytes": kv_bytes,
        "weight_bytes": weight_bytes,
        "expert_bytes": expert_bytes,
        "matmul_flops": matmul_flops,
        "attention_flops": attention_flops,
    }


def attention(bench: Bench, batch: int) -> dict:
    """Attention kernel at sparse and full lengths under several launch shapes."""
    shape = bench.model.shape
    kv, dim, group, block = shape.num_kv_heads, shape.head_dim, shape.group_size, shape.block_length
    make = {"device": bench.device, "dtype": torch.bfloat16}
    q = torch.randn(batch, kv, block * group, dim, **make)
    own = tuple(torch.randn(batch, kv, block, dim, **make) for _ in "kv")
    rows = torch.arange(batch, device=bench.device, dtype=torch.int32)
    found = {}
    for length in (int(0.05 * bench.args.context) + 32, bench.args.context):
        keys, values = (torch.randn(batch, kv, length + 64, dim, **make) for _ in "kv")
        lengths = torch.full_like(rows, length)
        for splits, block_m, block_n, warps, stages in (
            (1, 128, 64, 8, 2),
            (1, 128, 64, 8, 3),
            (1, 128, 128, 8, 2),
            (1, 128, 32, 8, 3),
            (1, 64, 64, 4, 2),
            (1, 64, 64, 4, 3),
            (1, 64, 128, 4, 2),
            (2, 64, 64, 4, 2),
            (2, 128, 64, 8, 2),
            (2, 128, 64, 8, 3),
            (2, 128, 128, 8, 2),
        ):
            options = {
                "splits": splits,
                "block_m": block_m,
                "block_n": block_n,
                "num_warps": warps,
                "num_stages": stages,
            }
            name = f"{length}: splits {splits}, rows {block_m}, keys {block_n}, warps {warps}, stages {stages}"
            try:
                times = timed_ms(
                    lambda k=keys, v=values, n=lengths, o=options: attend_lanes(q, k, v, own, rows, n, **o), 6, 2
                )
            except Exception as problem:
                found[name] = f"{type(problem).__name__}: {str(problem)[:160]}"
                continue
            moved = 2 * batch * kv * (length + block) * dim * 2
            found[name] = {"ms": median(times), "kv_tb_s": moved / median(times) / 1e9}
        # A draft step: two lanes a row, side by side or far apart.
        twice = [torch.cat([part, part]) for part in (q, *own, rows, lengths)]
        for paired in (False, True):
            shaped = {"paired": paired, **launch_shape(2 * batch * kv, length)}
            times = timed_ms(
                lambda k=keys, v=values, t=twice, o=shaped: attend_lanes(t[0], k, v, (t[1], t[2]), t[3], t[4], **o),
                6,
                2,
            )
            moved = 2 * batch * kv * (length + block) * dim * 2
            found[f"{length}: draft step, paired {paired}"] = {
                "ms": median(times),
                "kv_tb_s": moved / median(times) / 1e9,
            }
    return found


def run(bench: Bench, method: str, batch: int, *changed: str) -> dict:
    """A whole run of K blocks of T steps; figures are the executor's own.

    ``changed`` are settings of the method, ``name=value``, or ``key_only`` (``keys=key-only``).
    """
    args = bench.args
    settings = dict(("keys", "key-only") if name == "key_only" else name.split("=", 1) for name in changed)
    pipeline = build(bench.model.shape, method, **settings)
    options = Options(
        batch=batch,
        synthetic_kv=True,
        ignore_eos=True,
        threads=args.threads,
        keep_trace=True,
        seed=args.seed,
    )
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    outcome = decode(pipeline, bench.model, bench.requests(batch), policy=bench.policy(), options=options)
    found = outcome.result.to_dict()
    found["wall_s"] = time.perf_counter() - start
    found["hbm_peak_bytes"] = torch.cuda.max_memory_allocated()
    steps = [s for s in outcome.trace.spans if s.stage == "denoise" and s.block > 0]
    found["step_ms_median"] = median((s.end_ns - s.start_ns) / 1e6 for s in steps)
    for name in ("select", "gather", "upload", "project", "finish", "draft_down", "append"):
        spans = [s for s in outcome.trace.spans if s.stage == name and s.block >= 0]
        if spans:
            found[f"{name}_ms_median"] = median((s.end_ns - s.start_ns) / 1e6 for s in spans)
    found["host"] = host_side(outcome.trace.spans)
    found.update({name: found["host"][name] for name in ("select_gb_s", "gather_gb_s") if name in found["host"]})
    steps.sort(key=lambda s: s.start_ns)
    gaps = [(b.start_ns - a.end_ns) / 1e6 for a, b in pairwise(steps) if a.block == b.block]
    found["gap_between_steps_ms_median"] = median(gaps) if gaps else None
    # From one block's first step to the next one's, the first block (which captures and compiles) left out.
    begins = [min(s.start_ns for s in steps if s.block == block) for block in sorted({s.block for s in steps})]
    found["block_periods_s"] = [(b - a) / 1e9 for a, b in pairwise(begins)]
    found.update(ceiling(bench, pipeline, batch, found["throughput_tok_s"]))
    if args.trace:
        write_chrome(outcome.trace, args.out / f"trace-{'-'.join((method, str(batch), *changed))}.json")
    return found


def host_side(spans) -> dict:
    """Where the CPU's stream spends a block: rates of select and gather, and its time between one launch and the next.

    The first block is left out. ``select_layer_gb_s`` has the median of each layer; ``idle_between_selects_ms`` is from
    the end of a layer's selection to the start of the next one's (finish, project and what waits for them), and
    ``before_first_select_ms`` from a block's first step to the first selection (steps 0 and 1, and the draft's way).
    """
    later = [s for s in spans if s.block > 0]
    selects = sorted((s for s in later if s.stage == "select"), key=lambda s: s.start_ns)
    if not selects:
        return {}
    seconds = lambda some: sum(s.end_ns - s.start_ns for s in some) / 1e9  # noqa: E731
    rate = lambda some: sum(s.bytes for s in some) / GB / seconds(some)  # noqa: E731
    found: dict = {"select_gb_s": rate(selects), "select_busy_s_a_block": seconds(selects)}
    by_layer = {layer: [s for s in selects if s.layer == layer] for layer in sorted({s.layer for s in selects})}
    found["select_busy_s_a_block"] /= len(by_layer[selects[0].layer])
    found["select_layer_gb_s"] = {layer: median(rate([s]) for s in some) for layer, some in by_layer.items()}
    gathers = [s for s in later if s.stage == "gather"]
    if gathers:
        found["gather_gb_s"] = rate(gathers)
        beside = [sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for b in gathers) for a in selects]
        found["gather_beside_selects_share"] = sum(beside) / 1e9 / seconds(selects)
    idle = [(b.start_ns - a.end_ns) / 1e6 for a, b in pairwise(selects) if a.block == b.block]
    found["idle_between_selects_ms"] = {"median": median(idle), "worst": max(idle), "sum": sum(idle)} if idle else None
    begins = {s.block: s.start_ns for s in later if s.stage == "denoise" and s.step == 0}
    first = {s.block: s.start_ns for s in reversed(selects)}
    found["before_first_select_ms"] = [(first[n] - begins[n]) / 1e6 for n in sorted(first) if n in begins]
    for name in ("draft_down", "append"):
        found[f"{name}_ms"] = [(s.end_ns - s.start_ns) / 1e6 for s in later if s.stage == name]
    return found


def ceiling(bench: Bench, pipeline, batch: int, achieved: float | None) -> dict:
    """The host's ceiling of a method that scans the full KV once a block: bytes over the DRAM rate of ``rates``."""
    path = bench.args.out / "rates.json"
    known = json.loads(path.read_text()).get("result", {}) if path.exists() else {}
    scans = any(stage.action == "select" for stage in pipeline.template.stages())
    if not scans or "dram_read_gb_s" not in known or not achieved:
        return {}
    scanned = scanned_bytes(pipeline, batch, bench.args.context)
    limit = batch * pipeline.settings.block_length * known["dram_read_gb_s"] * GB / scanned
    return {"dram_ceiling_tok_s": limit, "achieved_over_dram_ceiling": achieved / limit}


def facts(args: argparse.Namespace) -> dict:
    """Provenance of every cell."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("BENCH_COMMIT") or (asked.stdout.strip() if asked.returncode == 0 else "unknown")
    return {
        "provenance": "measured",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "kernel_tier": cpu_kernels.active_tier(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model,
        "weights": "random",
        "kv": "synthetic",
        "context": args.context,
        "steps": args.steps,
        "blocks": args.blocks,
        "threads": args.threads,
    }


KINDS = {"rates": rates, "step": step, "attention": attention, "run": run}


def run_cell(bench: Bench, cell: str) -> dict:
    kind, *rest = cell.split(":")
    values = [int(part) if part.isdigit() else part for part in rest]
    start = time.perf_counter()
    try:
        result = {"result": KINDS[kind](bench, *values)}
    except Exception as problem:
        traceback.print_exc()
        result = {"error": f"{type(problem).__name__}: {problem}"}
    result["seconds"] = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    return result


def summary(cell: str, found: dict) -> str:
    if "error" in found:
        return f"{cell:24} {found['seconds']:6.1f} s  FAILED {found['error'][:200]}"
    flat = {}
    for name, value in found["result"].items():
        if isinstance(value, dict) and "median" in value:
            flat[name] = round(value["median"], 3)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = round(value, 4)
        elif isinstance(value, dict) and "kv_tb_s" in value:
            flat[name] = f"{value['ms']:.3f} ms, {value['kv_tb_s']:.2f} TB/s"
    return f"{cell:24} {found['seconds']:6.1f} s  " + ", ".join(f"{k} {v}" for k, v in flat.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--model", default="llada2-mini")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="also write Chrome traces")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device here", file=sys.stderr)
        return 2
    cells = args.cells.split(",")
    unknown = [cell for cell in cells if cell.split(":")[0] not in KINDS]
    if unknown:
        print(f"bench_gpu: unknown cells {', '.join(unknown)}; kinds are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    bench, begun, lines = Bench(args), time.perf_counter(), []
    for cell in cells:
        path = args.out / f"{cell.replace(':', '-').replace('=', '-')}.json"
        if path.exists() and "error" not in json.loads(path.read_text()):
            lines.append(f"{cell:24} is there already")
            continue
        if time.perf_counter() - begun > 60 * args.minutes:
            lines.append(f"{cell:24} not begun: the minute budget is spent")
            continue
        found = run_cell(bench, cell)
        path.write_text(json.dumps({"cell": cell, **facts(args), **found}, indent=1) + "\n")
        lines.append(summary(cell, found))
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
