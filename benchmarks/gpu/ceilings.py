"""Fig. 5's ceilings by the paper's protocol: what one resource alone allows, with everything else left out.

    full-KV and sparse fetch   pinned copies of a layer's entries for the whole batch, scaled by layers and steps
    CPU kernels                the kernel over the batch's real pool, layer after layer, at x = 32 and x = 1
    GPU forwards               the executor's graph of a denoise step over full or selected KV, without selection,
                               again and again until the clock has settled: a card at its power limit lowers it within
                               a second, and what is to be bounded are runs of minutes

Each is compared with its prediction from the raw rates that ``rates`` measured apart: bytes over a rate for copies,
bytes over the DRAM rate as the bound of the kernels, the roofline sum as that of a forward. A paced link (``link=``)
moves the copies in the same token bucket as the executor's.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.around import arithmetic, around
from benchmarks.gpu.bench import Bench, timed_ms
from benchmarks.gpu.cells import Cell
from herald_exec import kernels
from herald_exec.pacing import Bucket

GB = 1e9
_POOL_BYTES = 24e9
"""Host memory that a kernel's pool may take: as many layers of the batch as fit."""
_LEAST_S = 2.0
"""A kernel is timed over its layers for so long: the median of ten calls moved by a third within minutes."""
_READS = 3
"""Of the whole pool, before the kernel and after it."""
BUDGET = 0.05


def ceiling(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Seconds of a block on one resource, the ceiling in tokens/s that follow, and what raw rates predict."""
    measure: Callable[[Bench, Cell], dict[str, Any]] = {
        "full_kv_fetch_per_step": _fetch,
        "sparse_fetch_per_step": _fetch,
        "sparse_fetch_per_block": _fetch,
        "cpu_32q_kernel": _kernel,
        "cpu_1q_kernel": _kernel,
        "gpu_full_kv_forward": _forward,
        "gpu_sparse_forward": _forward,
    }[cell.what]
    found = measure(bench, cell)
    tokens = cell.batch * bench.shape.block_length
    found["ceiling_tok_s"] = tokens / found["block_s"]
    if "predicted_block_s" in found:
        found["predicted_tok_s"] = tokens / found["predicted_block_s"]
        found["predicted_over_measured"] = found["predicted_tok_s"] / found["ceiling_tok_s"]
    return {"context": cell.context, "batch": cell.batch, "steps": bench.steps(cell), **found}


def _fetch(bench: Bench, cell: Cell) -> dict[str, Any]:
    """One layer of the batch over the link, times layers and times a block."""
    shape = bench.shape
    full = cell.what.startswith("full")
    entries = cell.context if full else max(1, int(BUDGET * cell.context))
    times = bench.steps(cell) if cell.what.endswith("per_step") else 1
    size = int(cell.batch * entries * shape.kv_bytes_per_token_layer(bench.pipeline_dtype))
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=bench.on_cuda)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    link = cell.options.get("link")
    bucket = None if link is None else Bucket(float(link))

    def copy() -> None:
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if bucket is not None:
            if bench.on_cuda:
                torch.cuda.current_stream().synchronize()
            bucket.hold(begun, size)

    if bucket is None:
        layer_s = median(timed_ms(bench, copy, repeats=20)) / 1e3
    else:
        begun = time.perf_counter()
        for _ in range(5):
            copy()
        layer_s = (time.perf_counter() - begun) / 5
    block_s = layer_s * shape.num_layers * times
    found = {
        "layer_bytes": size,
        "times_a_block": times,
        "layer_s": layer_s,
        "block_s": block_s,
        "gb_s": size / layer_s / GB,
    }
    rate = float(link) if link is not None else bench.known_rates().get("h2d_gb_s")
    if rate:
        found["predicted_block_s"] = size * shape.num_layers * times / (rate * GB)
    return found


def _kernel(bench: Bench, cell: Cell) -> dict[str, Any]:
    """The selection kernel over the batch's pool, layer after layer."""
    shape, queries = bench.shape, 1 if cell.what == "cpu_1q_kernel" else bench.shape.block_length
    layer_bytes = cell.batch * cell.context * shape.kv_bytes_per_token_layer(bench.pipeline_dtype)
    layers = max(1, min(shape.num_layers, int(_POOL_BYTES / layer_bytes)))
    slots, lengths = np.arange(cell.batch), np.full(cell.batch, cell.context)
    budget = np.full(cell.batch, max(1, int(BUDGET * cell.context)))
    q = np.random.default_rng(0).standard_normal(
        (cell.batch, queries, shape.num_heads, shape.head_dim), dtype=np.float32
    )
    threads = bench.threads(cell)
    pool = kernels.PagedKV(layers, cell.batch, shape.num_kv_heads, cell.context, shape.head_dim, bench.kv_dtype)
    with pool:
        pool.fill_normal(0, threads)
        before = _host(bench, pool, queries, threads)
        seconds: list[float] = []
        while len(seconds) < layers + 2 or sum(seconds) < _LEAST_S:
            begun = time.perf_counter()
            kernels.select(pool, len(seconds) % layers, slots, lengths, q, budget, threads=threads)
            seconds.append(time.perf_counter() - begun)
        after = _host(bench, pool, queries, threads)
    layer_s = median(seconds[1:])
    dram = max(rates["pool_read_gb_s"] for rates in (before, after))
    return {
        "queries": queries,
        "layers_in_pool": layers,
        "layer_bytes": layer_bytes,
        "layer_s": layer_s,
        "calls": len(seconds) - 1,
        "gb_s": layer_bytes / layer_s / GB,
        "block_s": layer_s * shape.num_layers,
        # What reading alone allows on this very pool: the kernel's bound, not its prediction.
        "pool_read_gb_s": dram,
        "bound_tok_s": cell.batch * shape.block_length * dram * GB / (layer_bytes * shape.num_layers),
        "share_of_bound": layer_bytes / layer_s / GB / dram,
        # What it is predicted with: the place of this pool, and what moves from minute to minute.
        **around(before, after),
    }


def _host(bench: Bench, pool: kernels.PagedKV, queries: int, threads: int | None) -> dict[str, float]:
    """What the host gives now: reading this very pool, as runs state it of theirs, and arithmetic."""
    read = median(kernels.pool_read_gb_s(pool, threads) for _ in range(_READS))
    return {"pool_read_gb_s": read, **arithmetic(bench.shape, queries, threads)}


def _forward(bench: Bench, cell: Cell) -> dict[str, Any]:
    """T steps, head included, at the pace of constant load; that of a burst beside it."""
    from benchmarks.gpu.sustained import sustained

    method = "dense" if cell.what == "gpu_full_kv_forward" else "mage-cpu-representative"
    found = sustained(bench, Cell(cell.name, "sustained", method, cell.context, cell.batch), with_rests=False)
    times = bench.steps(cell)
    result = {
        "block_s": times * found["load_ms"] / 1e3,
        "burst_block_s": times * found["burst_ms"] / 1e3,
        "step": found,
    }
    floor = found["roofline"].get("sum_ms")
    if floor:
        result["roofline_block_s"] = times * floor / 1e3
    return result
