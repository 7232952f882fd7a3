"""Pairs that run at once in a method: how much longer each takes beside the other than alone.

The profile shares the link and the GPU by arithmetic; these pairs say how well that holds on this machine. What
selection loses to gathers and copies beside it is a number of the profile.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from calibration import beside_scan
from calibration.bench import TORCH_DTYPES, Bench, Beside, Part, Value, row_of
from calibration.gpu.graphs import captured
from calibration.parts import gemm, launch
from calibration.timing import Timing, Work
from herald_exec import kernels
from herald_exec.attention import attend_partial
from herald_pipeline.units import GB


def measure(bench: Bench) -> Part:
    """Products and attention of the main stream, each beside selection and beside copies of the retrieval stream."""
    part = Part("contention")
    # What disturbs is the question here, so nothing is refused.
    bench = replace(bench, plan=replace(bench.plan, max_spread=1e9, more=0))
    shape, block = bench.shape, bench.block_length
    model = gemm.layers_model(bench)
    requests, prefix = (1, 2048) if bench.quick else (4, 4096)
    q = bench.random(requests, block, shape.num_heads, shape.head_dim)
    k, v = (bench.random(requests, shape.num_kv_heads, prefix, shape.head_dim) for _ in range(2))
    main: dict[str, Work] = {
        "products": gemm.products(bench, model, block),
        "attention": lambda: attend_partial(q, k, v),
    }
    if bench.on_cuda:
        main = {name: _to_its_end(bench, work) for name, work in captured(bench, main).items()}
    size = (256 if bench.on_cuda else 16 if bench.quick else 256) * 2**20
    source, target = torch.zeros(size // 4, pin_memory=bench.on_cuda), torch.zeros(size // 4, device=bench.device)
    rows, context = (80, 32768) if bench.on_cuda else (4, 8192) if bench.quick else (8, 32768)
    with kernels.PagedKV(1, rows, shape.num_kv_heads, context, shape.head_dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
        queries = np.ones((rows, 1, shape.num_heads, shape.head_dim), np.float32)
        slots, lengths = np.arange(rows), np.full(rows, context)
        budget = np.full(rows, context // 20)
        threads = bench.retrieval_threads
        found = kernels.select(pool, 0, slots, lengths, queries, budget, threads=threads)
        dims = (rows, shape.num_kv_heads, context // 20, shape.head_dim)
        ring = [torch.zeros(dims, dtype=TORCH_DTYPES[bench.dram_kv_dtype], pin_memory=bench.on_cuda) for _ in range(2)]
        others: dict[str, Work] = {
            "selection": lambda: kernels.select(pool, 0, slots, lengths, queries, budget, threads=threads),
            "gather": lambda: kernels.gather(pool, 0, slots, found, ring[0], ring[1], threads=threads),
            "copies": lambda: target.copy_(source),
        }
        alone = bench.time(main)
        alone_other = bench.time_host(others)
        for name, work in others.items():
            with Beside(bench.retrieval_cores, work):
                beside = bench.time(main)
            for main_name, timing in beside.items():
                slower = timing.seconds / alone[main_name].seconds
                part.rows.append(row_of(timing, case=main_name, beside=name, times_as_long=round(slower, 3)))
        for main_name, work in main.items():
            with Beside(bench.main_cores, work):
                beside = bench.time_host(others)
            for name, timing in beside.items():
                slower = timing.seconds / alone_other[name].seconds
                part.rows.append(row_of(timing, case=name, beside=main_name, times_as_long=round(slower, 3)))
        pairs: dict[tuple[str, str], Timing] = {}
        for name, work in others.items():
            rest = {other: its for other, its in others.items() if other != name}
            with Beside(bench.retrieval_cores, work):
                beside = bench.time_host(rest)
            for other, timing in beside.items():
                pairs[other, name] = timing
                slower = timing.seconds / alone_other[other].seconds
                part.rows.append(row_of(timing, case=other, beside=name, times_as_long=round(slower, 3)))
        if bench.on_cuda:
            beside_scan.measure(bench, part, pool, rows, context)
            _beside_rows(bench, part)
            part.values.append(short_runs_beside(bench, part, others["selection"]))
    if bench.on_cuda:
        from calibration.gpu import turns

        part.values.append(turns.measure(bench, part))
        dram = bench.rate("machine.dram.read_gb_s", "dram") * GB
        copied = {"gather": 4.0 * ring[0].numel() * ring[0].element_size(), "copies": float(size)}
        part.values += losses(alone_other["selection"].seconds, pairs, {k: n / dram for k, n in copied.items()})
    return part


def _beside_rows(bench: Bench, part: Part) -> None:
    from calibration.gpu import fetching_steps  # a GPU's: Triton

    fetching_steps.measure(bench, part)


def short_runs_beside(bench: Bench, part: Part, selecting: Work) -> Value:
    """How much longer launches that bring blocks to the host take beside a selection: runs as of the part launch."""
    alone, beside = {}, []
    for requests in launch.REQUESTS:
        size = launch.append_bytes(bench, requests)
        alone[size] = launch.stage_timings(bench, bench.model, launch.short_point(bench, requests))["append"]
        with Beside(bench.retrieval_cores, selecting):
            found = launch.stage_timings(bench, bench.model, launch.short_point(bench, requests))["append"]
        beside.append((size, found))
        slower = found.seconds / alone[size].seconds
        part.rows.append(
            row_of(found, case="append", beside="selection", rows=requests, times_as_long=round(slower, 3))
        )
    return beside_scan.appends(alone, beside)


def losses(alone_s: float, pairs: Mapping[tuple[str, str], Timing], moved_s: Mapping[str, float]) -> list[Value]:
    """What selection loses to each of ``moved_s``, over the seconds that as many bytes take at the read rate.

    ``alone_s`` is a selection alone; ``pairs`` are (what is timed, what runs beside it all the time). While one gather
    is under way, of its time beside selections, these lose the share by which they are slower beside gathers.
    """
    found = []
    for other, name in (("copies", "copy"), ("gather", "gather")):
        slow, busy = pairs["selection", other], pairs[other, "selection"]
        lost_s = busy.seconds * max(0.0, 1.0 - alone_s / slow.seconds)
        spread = round(max(slow.spread, busy.spread), 4)
        note = f"selection beside {other}, which run all the time"
        found.append(
            Value(f"engine.{name}_beside_cost", "x", max(0.01, lost_s / moved_s[other]), spread=spread, note=note)
        )
    return found


def _to_its_end(bench: Bench, replay: Work) -> Work:
    """A replay that the caller waits for: a loop of them must not run ahead of the device, nor hold up copies."""

    def run() -> None:
        with torch.cuda.stream(bench.stream):
            replay()
            bench.stream.synchronize()

    return run
