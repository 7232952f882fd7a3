"""Whole runs: a method at a context and a batch. Table II and Figs. 12 to 14 are made of these."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.around import around, host_rates, pool_layers
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.estimates import keeps_on_host
from benchmarks.gpu.host_side import host_side
from herald_exec import Options, decode
from herald_exec.execution import Run
from herald_exec.footprint import run_memory
from herald_exec.session import OnBlock
from herald_pipeline import capacity
from herald_pipeline.memory import UNLIMITED_BYTES, Memory
from herald_pipeline.pipeline import Pipeline, scanned_bytes
from herald_pipeline.pools import Home
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.trace import Span, write_chrome
from herald_pipeline.workload import Workload, parse_policy

GB = 1e9
_FORWARDS = ("denoise", "step_layer", "decide", "select_step")


def run(bench: Bench, cell: Cell, *, on_block: OnBlock | None = None) -> dict[str, Any]:
    """A run of K blocks of T steps; figures are the executor's own, the first block apart."""
    pipeline = bench.pipeline(cell)
    found_bytes = _require(bench, cell, pipeline)
    options = Options(
        batch=cell.batch,
        policy=parse_policy(str(cell.options.get("policy", BatchPolicy.LOCKSTEP))),
        synthetic_kv=True,
        ignore_eos=True,
        threads=bench.threads(cell),
        keep_trace=True,
        seed=0,
        on_block=on_block,
        **({"link_limit_gb_s": cell.options["link"]} if "link" in cell.options else {}),
    )
    pool_bytes = cell.batch * cell.context * bench.shape.kv_bytes_per_token(bench.pipeline_dtype)
    threads = bench.threads(cell)
    before = host_rates(pipeline, threads, pool_layers(pipeline, int(pool_bytes), threads))
    start = time.perf_counter()
    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    done = decode(pipeline, bench.model, bench.requests(cell), policy=bench.policy(bench.steps(cell)), options=options)
    found: dict[str, Any] = {**_point(bench, cell, pipeline), **done.result.to_dict()}
    found["wall_s"] = time.perf_counter() - start
    _note(bench, cell, pipeline, found)
    if bench.on_cuda:
        found["hbm_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["hbm_formula_bytes"] = found_bytes
        found["hbm_peak_over_formula"] = found["hbm_peak_bytes"] / found_bytes
    found.update(_spans(done))
    layers = pool_layers(pipeline, int(pool_bytes), threads)
    found.update(around(before, host_rates(pipeline, threads, layers)))
    if layers and "host" in found:
        found["host"]["pool_layer_read_gb_s"] = layers
    found.update(_host_ceiling(bench, cell, pipeline, found))
    if bench.args.trace and done.trace is not None:
        write_chrome(done.trace, bench.out / f"trace-{cell.file}.gz")
    return found


def _note(bench: Bench, cell: Cell, pipeline: Pipeline, found: dict[str, Any]) -> None:
    """Tell the estimates how long it took until blocks ran at their pace."""
    full_gb = cell.batch * cell.context * bench.shape.kv_bytes_per_token(bench.pipeline_dtype) / GB
    block_s = found.get("block_time_s") or 0.0
    before_s = (found.get("fill_time_s") or 0.0) + max(0.0, (found.get("first_block_time_s") or 0.0) - block_s)
    bench.note_run(full_gb if keeps_on_host(pipeline) else 0.0, before_s)


def _ours_gb(bench: Bench) -> float:
    """What this process may have of the device: free now, or its own already. Runtimes and others are left out."""
    free, _ = torch.cuda.mem_get_info(bench.device)
    return (free + torch.cuda.memory_reserved(bench.device)) / GB


def _require(bench: Bench, cell: Cell, pipeline: Pipeline) -> float:
    """Device memory by the formula; refuse a cell that the device, or a stated limit's card, would not hold.

    A limit stands for a card that serves real prompts, so it counts their prefill; what this run takes does not.
    """
    block = bench.shape.block_length
    workload = Workload.uniform(cell.context, cell.batch, gen_tokens=block * bench.blocks(cell), block_length=block)
    if "hbm" in cell.options:
        limit_bytes = float(cell.options["hbm"]) * GB
        capacity.require(pipeline, workload, Memory(limit_bytes, limit_bytes, UNLIMITED_BYTES))
    ours_bytes = _ours_gb(bench) * GB if bench.on_cuda else UNLIMITED_BYTES
    memory = run_memory(ours_bytes, UNLIMITED_BYTES, pipeline, on_gpu=bench.on_cuda, synthetic=True)
    budget = capacity.require(pipeline, workload, memory)
    return budget.total(Home.HBM, transient=False) + budget.passing_bytes


def _point(bench: Bench, cell: Cell, pipeline: Pipeline) -> dict[str, Any]:
    """The configuration, as the adapter of ``calibration reconcile`` reads it."""
    return {
        "context": cell.context,
        "steps": bench.steps(cell),
        "blocks": bench.blocks(cell),
        "block_length": pipeline.settings.block_length,
        "kv_dtype": bench.kv_dtype,
        "options": dict(cell.options),
    }


def _spans(done: Run) -> dict[str, Any]:
    """What the trace says beside the result: medians of each stage, gaps between steps, block periods."""
    assert done.trace is not None
    spans = [span for span in done.trace.spans if span.block > 0]
    found: dict[str, Any] = {"stage_ms_median": {}}
    for name in dict.fromkeys(span.stage for span in spans):
        found["stage_ms_median"][name] = median(_ms(span) for span in spans if span.stage == name)
    host = host_side(spans)
    if host:
        found["select_gb_s"], found["host"] = host["select_gb_s"], host
    steps = sorted((span for span in spans if span.stage in _FORWARDS), key=lambda span: span.start_ns)
    gaps = [(b.start_ns - a.end_ns) / 1e6 for a, b in pairwise(steps) if a.block == b.block]
    found["gap_between_steps_ms_median"] = median(gaps) if gaps else None
    begins = [min(s.start_ns for s in steps if s.block == block) for block in sorted({s.block for s in steps})]
    found["block_periods_s"] = [(b - a) / 1e9 for a, b in pairwise(begins)]
    return found


def _ms(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e6


def _host_ceiling(bench: Bench, cell: Cell, pipeline: Pipeline, found: dict[str, Any]) -> dict[str, Any]:
    """The ceiling of a method that scans the full KV once a block: bytes over the DRAM's read rate.

    The fastest rate counts that was read beside the run or by ``rates``: memory that a virtual machine has never
    touched reads slower (116 GB/s where 170 to 190 followed); a ceiling from it would lie below what runs achieve.
    """
    rates = [*found.get("host_rates", {}).get("dram_read_gb_s", ()), bench.known_rates().get("dram_read_gb_s", 0.0)]
    scans = any(stage.action == "select" for stage in pipeline.template.stages())
    if not scans or pipeline.template.step or not max(rates) or not found["throughput_tok_s"]:
        return {}
    read = scanned_bytes(pipeline, cell.batch, cell.context)
    limit = cell.batch * bench.shape.block_length * max(rates) * GB / read
    return {"dram_ceiling_tok_s": limit, "achieved_over_dram_ceiling": found["throughput_tok_s"] / limit}
