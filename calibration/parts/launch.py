"""What a launch costs the host: empty ones, and the stages of the retrieval pass at a context that is next to nothing.

The pass runs in the executor beside real steps, with a short prompt, so that what is left of each stage is its fixed
cost: bookkeeping, small kernels, waiting for the interpreter. The method is ``herald-no-draft``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibration import exchange, overheads
from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.other_gathers import selected_rows
from calibration.parts import gemm
from calibration.parts.gemm import layers_model
from calibration.points import Point
from calibration.runs import run_point
from calibration.timing import Timing
from herald_exec import kernels
from herald_exec.attention import attend_partial, merge
from herald_exec.models import BlockModel
from herald_exec.streams import Completion, ThreadStreams
from herald_pipeline.units import GB, NS_PER_S

_LAUNCHES = 100
_RUNS = 3
_METHOD = "mage-cpu-representative"
REQUESTS = (4, 80)
"""On a GPU: what grows with the requests is the better part of it, so the larger one is a large batch."""


def measure(bench: Bench) -> Part:
    """Empty launches in a row on one stream, and back and forth between two."""
    part = Part("launch")
    cores = {"main": frozenset(bench.main_cores), "retrieval": frozenset(bench.retrieval_cores)}
    bound = {name: own for name, own in cores.items() if own}
    streams = _streams(bench, bound)
    try:
        timings = bench.time_anywhere({"in a row": lambda: _in_a_row(streams)})
        # No number of the profile comes of it, so its samples are shown and never refused.
        lenient = replace(bench, plan=replace(bench.plan, max_spread=1e9, more=0))
        timings |= lenient.time_anywhere({"back and forth": lambda: _back_and_forth(streams)})
    finally:
        streams.close()
    for name, timing in timings.items():
        part.rows.append(row_of(timing, case=name, launches=_LAUNCHES, us=round(timing.seconds / _LAUNCHES * 1e6, 2)))
    row = timings["in a row"]
    stage_s = row.seconds / _LAUNCHES
    part.values += _stage_overheads(bench, part, stage_s) if bench.fused else overheads.measure(bench, part, stage_s)
    part.values.append(Value("engine.stage_overhead_us", "us", stage_s * 1e6, spread=row.spread, note="empty launches"))
    if bench.fused:
        from calibration.gpu import launches, steps

        part.values += launches.kernel_counts(bench)
        steps.measure_turns(bench, part)
        return part
    with torch.inference_mode():
        kernels = layer_kernels(bench)
    part.rows += [{"case": f"kernels, {name}", "launches": count} for name, count in kernels.items()]
    note = "torch operations that compute, counted in one layer"
    part.values += [
        Value("engine.kernels_per_layer", "kernels", float(kernels["denoise"]), note=note),
        Value("engine.retrieval_kernels_per_layer", "kernels", float(kernels["retrieval"]), note=note),
    ]
    return part


def _stage_overheads(bench: Bench, part: Part, stage_s: float) -> list[Value]:
    """Fixed cost of retrieval's stages: their medians at a short prompt, less what is priced by itself."""
    runs = {requests: _least(bench, part, short_point(bench, requests)) for requests in REQUESTS}
    fewest, requests = REQUESTS[0], REQUESTS[-1]
    timings = runs[requests]
    alone = _layer_alone(bench, requests)
    layer = max(0.0, timings["project"].seconds + timings["finish"].seconds - alone)
    note = f"{_METHOD}, {2 * bench.block_length} tokens, {{}} requests; least of {_RUNS} medians"
    at = {"gather": fewest, "h2d": fewest}
    # What is no longer for more requests is their bytes' to pay for; the fewer they are, the less hides it.
    gather, upload = (runs[fewest][name] for name in ("gather", "upload"))
    seconds = {
        "retrieval_layer": (layer, timings["finish"]),
        "select": (max(0.0, timings["select"].seconds - _select_alone(bench, requests)), timings["select"]),
        "gather": (max(0.0, gather.seconds - _gather_alone(bench, fewest)), gather),
        "h2d": (upload.seconds, upload),
    }
    appends = {append_bytes(bench, count): found["append"] for count, found in runs.items()}
    return [
        *(
            Value(
                f"engine.{name}_overhead_us",
                "us",
                value * 1e6,
                spread=round(timing.spread, 4),
                note=note.format(at.get(name, requests)),
            )
            for name, (value, timing) in seconds.items()
        ),
        _append(bench, appends),
        *exchange.measure(bench, part, stage_s),
    ]


def _append(bench: Bench, timings: Mapping[float, Timing]) -> Value:
    """What a launch to the host takes beyond its bytes on the link, by these bytes: blocks go into pages one by one."""
    rate = bench.rate("machine.link.d2h_gb_s", "copies") * GB
    at = tuple(sorted(timings))
    rest = tuple(max(0.0, timings[size].seconds - size / rate) * 1e6 for size in at)
    note = f"append of {_METHOD}, {REQUESTS[0]} and {REQUESTS[-1]} requests, less the copy; least of {_RUNS} medians"
    return Value("engine.d2h_overhead_us", "us", rest, at, "B", widest(timings.values()), note)


def append_bytes(bench: Bench, requests: int) -> float:
    """Bytes of the blocks of so many requests, all layers."""
    return float(requests * bench.block_length * bench.shape.kv_bytes_per_token(bench.kv_dtype))


def short_point(bench: Bench, requests: int) -> Point:
    """A pass beside which nothing runs: that its kernels wait for others' is the simulator's to find."""
    block, kv = bench.block_length, str(bench.kv_dtype)
    return Point(_METHOD, 2 * block, requests, blocks=4, block_length=block, kv_dtype=kv)


def _least(bench: Bench, part: Part, point: Point) -> dict[str, Timing]:
    """Of every stage the least of its medians in several runs: what disturbs a run only adds."""
    runs = [stage_timings(bench, bench.model, point) for _ in range(_RUNS)]
    part.rows += [
        row_of(timing, case=f"stage {name}, run {number}", requests=point.batch, launches=1)
        for number, run in enumerate(runs)
        for name, timing in run.items()
    ]
    return {name: min((run[name] for run in runs), key=lambda timing: timing.seconds) for name in runs[0]}


def stage_timings(bench: Bench, model: BlockModel, point: Point) -> dict[str, Timing]:
    """Durations of every stage's launches in one run of ``point``, the first block left out."""
    run = run_point(point, model, keep_trace=True, threads=len({*bench.main_cores, *bench.retrieval_cores}))
    assert run.trace is not None
    found: dict[str, list[float]] = {}
    for span in run.trace.spans:
        if span.block > 0:
            found.setdefault(span.stage, []).append((span.end_ns - span.start_ns) / NS_PER_S)
    return {name: Timing(name, tuple(samples), 1) for name, samples in found.items()}


def _layer_alone(bench: Bench, rows: int) -> float:
    """Seconds of a layer's products at one query a request, which the cost model counts by themselves."""
    if bench.fused:
        from calibration.gpu import launches

        return launches.layer_seconds(bench, rows)
    layers = gemm.layers_model(bench)
    products = bench.time_host({"products": gemm.products(bench, layers, rows)})
    return products["products"].seconds / layers.shape.num_layers


def _select_alone(bench: Bench, rows: int) -> float:
    """Seconds of the kernel over the short run's prompts: the selection's curve begins with its fixed costs."""
    shape, context = bench.shape, 2 * bench.block_length
    with kernels.PagedKV(1, rows, shape.num_kv_heads, context, shape.head_dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
        q = np.random.default_rng(0).standard_normal((rows, 1, shape.num_heads, shape.head_dim), dtype=np.float32)
        slots, lengths, k = np.arange(rows), np.full(rows, context), np.full(rows, max(1, context // 20))
        threads = bench.retrieval_threads
        timing = bench.time_host({"": lambda: kernels.select(pool, 0, slots, lengths, q, k, threads=threads)})[""]
    return timing.seconds


def _gather_alone(bench: Bench, rows: int) -> float:
    """Seconds of the kernel over the short run's selected rows: the gather's curve begins with its fixed costs."""
    shape, context = bench.shape, 2 * bench.block_length
    with kernels.PagedKV(1, rows, shape.num_kv_heads, context, shape.head_dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
        found = selected_rows(bench, pool, rows, context)
        heads, k = found.indices.shape[1:]
        counts, status = np.full((rows, heads), k, np.int32), np.zeros((rows, heads), np.uint8)
        picked = kernels.Selection(np.zeros(0, np.float32), found.indices, counts, status)
        threads, ring = bench.retrieval_threads, found.buffers

        def work() -> None:
            kernels.gather(pool, 0, found.slots, picked, ring[0], ring[1], threads=threads)

        return bench.time_host({"": work})[""].seconds


def _streams(bench: Bench, cores: dict[str, frozenset[int]]) -> ThreadStreams:
    """Streams as the executor opens them on this device."""
    if bench.on_cuda:
        from herald_exec.cuda import CudaStreams

        return CudaStreams(("main", "retrieval"), bench.device, high_priority=("retrieval",), cores=cores)
    return ThreadStreams(("main", "retrieval"), cores)


def _nothing(_: Completion) -> None:
    return None


def _in_a_row(streams: ThreadStreams) -> None:
    for _ in range(_LAUNCHES):
        last = streams.submit("main", "empty", _nothing, ())
    streams.wait(last)


def _back_and_forth(streams: ThreadStreams) -> None:
    earlier: tuple[Completion, ...] = ()
    for number in range(_LAUNCHES):
        earlier = (streams.submit(("main", "retrieval")[number % 2], "empty", _nothing, earlier),)
    streams.wait(earlier[0])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that are no mere views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "detach" not in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def layer_kernels(bench: Bench) -> dict[str, int]:
    """Kernels of one layer of a denoise forward, and of the part of a retrieval layer that runs on the device."""
    model, block = layers_model(bench), bench.block_length
    counts = {}
    for name, tokens in (("denoise", block), ("retrieval", 1)):
        with _Counting() as counting:
            _layer(bench, model, tokens, attends=name == "denoise")
        counts[name] = counting.count
    return counts


def _layer(bench: Bench, model: BlockModel, tokens: int, *, attends: bool) -> None:
    shape = model.shape
    hidden = bench.random(tokens, shape.hidden_size)
    q, k, v = model.project(0, hidden, model.rotary(torch.arange(tokens, device=bench.device)))
    attended = q
    if attends:
        q, k, v = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        attended = merge(attend_partial(q, k, v), attend_partial(q, k, v))[0]
    model.finish(0, hidden, attended)
