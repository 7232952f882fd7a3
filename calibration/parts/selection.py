"""CPU selection by context, queries and threads, split into what each KV byte and each query row costs.

The time is ``overhead + bytes / (share x DRAM rate) + FLOPs / (share x attention rate)``: the two sums that the cost
model adds. Overhead and the cost of a byte are found by non-negative least squares over all points, weighted by their
size; what is left is the cost of a FLOP, by number of queries. On a server that is the largest selection's: smaller
ones with a block's queries take longer for a FLOP, because threads share heads, and a curve over bytes says how much.

Where a pool lies in memory decides up to a tenth of the time, whatever reads it, and on one virtual machine up to a
third: the layers of a run's 107 GB were scanned at 82 to 127 GB/s. So on a server calls go round the layers of a pool,
as those of a run do, and the median is that of several places; they are few, and the largest runs have more.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from scipy.optimize import nnls

from calibration import fewer_bytes
from calibration.bench import Bench, Part, Value, pinned, row_of, widest
from calibration.timing import Timing
from herald_exec import kernels
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB

_LAYERS = 3
"""Layers of the pool on a server."""


@dataclass(frozen=True, slots=True)
class Point:
    """One selection: ``rows`` requests of ``context`` entries, ``queries`` tokens each."""

    rows: int
    context: int
    queries: int

    @property
    def name(self) -> str:
        """Key of its timing."""
        return f"{self.rows}x{self.context} x={self.queries}"


def measure(bench: Bench) -> Part:
    """Selection over (requests, context, queries) on the retrieval stream's threads; one context over threads."""
    part = Part("selection")
    shape, threads = bench.shape, bench.retrieval_threads
    points = [Point(rows, context, x) for x in (1, 4, bench.block_length) for rows, context in grid(bench)]
    most = max(point.context for point in points)
    slots = max(point.rows for point in points)
    entry = 2 * shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.dram_kv_dtype, shape.head_dim)
    generator = np.random.default_rng(0)
    dram = bench.rate("machine.dram.read_gb_s", "dram") * GB
    per_flop: dict[int, float] = {}
    layers = _LAYERS if bench.on_cuda else 1
    with kernels.PagedKV(layers, slots, shape.num_kv_heads, most, shape.head_dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()

        def case(point: Point, count: int = threads):  # type: ignore[no-untyped-def]  # noqa: ANN202
            q = generator.standard_normal(
                (point.rows, point.queries, shape.num_heads, shape.head_dim), dtype=np.float32
            )
            slot = np.arange(point.rows)
            lengths = np.full(point.rows, point.context)
            k, turn = np.full(point.rows, max(1, point.context // 20)), cycle(range(layers))
            return lambda: kernels.select(pool, next(turn), slot, lengths, q, k, threads=count)

        timings = bench.time_host({point.name: case(point) for point in points})
        by_threads = {}
        widest_point = max(points, key=lambda p: (p.queries == 1, p.rows * p.context))
        if threads > 1:
            counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < threads]
            by_threads = bench.time_host({f"{n} threads": case(widest_point, n) for n in counts})
        in_place = _in_place(bench, pool, next((p for p in points if p.name == _IN_PLACE), None))
        add_fewer_bytes = fewer_bytes.measure(bench, part, pool, grid(bench), lambda: per_flop[1], dram)
    bytes_of = {p.name: p.rows * p.context * entry for p in points}
    flops_of = {p.name: 4.0 * p.rows * p.queries * p.context * shape.num_heads * shape.head_dim for p in points}
    seconds = {p.name: timings[p.name].seconds for p in points}
    _, per_byte, found = split(points, seconds, bytes_of, flops_of, 1 / dram)
    per_flop.update(found)
    fastest = 1 / min(per_flop.values())
    for point in points:
        size = bytes_of[point.name]
        gb_s = round(size / seconds[point.name] / GB, 3)
        columns = {"rows": point.rows, "context": point.context, "queries": point.queries, "threads": threads}
        part.rows.append(row_of(timings[point.name], **columns, bytes=size, gb_s=gb_s))
    if in_place is not None:
        place = "in turn over the whole pool, with rests"
        part.rows.append(row_of(in_place, case=place, queries=bench.block_length, threads=threads))
    for name, timing in by_threads.items():
        columns = {"rows": widest_point.rows, "context": widest_point.context, "queries": 1}
        part.rows.append(row_of(timing, **columns, threads=int(name.split()[0])))
    spread = widest(timings.values())
    queries = sorted(per_flop)
    share: tuple[float, ...] | float = min(1.0, 1 / (per_byte * dram))
    at: tuple[float, ...] = ()
    if bench.on_cuda:
        one = {bytes_of[p.name]: (seconds[p.name], flops_of[p.name]) for p in points if p.queries == 1}
        share, at = reading_curve(one, per_flop[1], dram)
    note = f"{threads} thread(s), tier {kernels.active_tier()}, KV in {bench.dram_kv_dtype}"
    part.values = [
        Value("machine.cpu.attention_tflop_s", "TFLOP/s", fastest / 1e12, spread=spread, note=note),
        Value("engine.select_dram_efficiency", "share", share, at, "B" if at else "", spread, note),
        Value(
            "engine.select_flops_efficiency",
            "share",
            tuple(min(1.0, 1 / (per_flop[x] * fastest)) for x in queries),
            tuple(float(x) for x in queries),
            "queries",
            spread,
            note,
        ),
    ]
    if bench.on_cuda:
        reading = {size: size / (y * dram) for size, y in zip(at, share, strict=True)}  # type: ignore[arg-type]
        many = [p for p in points if p.queries == bench.block_length]
        times_as_long, at = size_curve(many, seconds, bytes_of, flops_of, reading, per_flop[bench.block_length])
        size_note = f"{note}; {bench.block_length} queries"
        part.values.append(Value("engine.select_size_cost", "x", times_as_long, at, "B", spread, size_note))
    add_fewer_bytes()
    if bench.fused:
        from calibration.gpu import top_k

        top_k.measure(bench, part)
    return part


_IN_PLACE = "16x32768 x=32"
_REST_S = 0.003
"""Between the selections of two layers of ``mage-cpu``: the device finishes one layer and projects the next."""


def _in_place(bench: Bench, pool: kernels.PagedKV, point: Point | None) -> Timing | None:
    """``mage-cpu``'s selection as its runs have it: no layer twice in a row, all over the pool, rests between.

    No number of the profile comes of it; beside the kernel's own time it tells whether place or rests make a stage
    longer than its kernel.
    """
    if point is None or not bench.on_cuda:
        return None
    shape, generator = bench.shape, np.random.default_rng(0)
    dims = (point.rows, point.queries, shape.num_heads, shape.head_dim)
    q, lengths = generator.standard_normal(dims, dtype=np.float32), np.full(point.rows, point.context)
    k, threads = np.full(point.rows, point.context // 20), bench.retrieval_threads
    groups = [np.arange(first, first + point.rows) for first in range(0, pool.num_slots - point.rows + 1, point.rows)]
    seconds = []
    with pinned(bench.retrieval_cores):
        for slots in groups:
            for layer in range(pool.num_layers):
                time.sleep(_REST_S)
                begun = time.perf_counter()
                kernels.select(pool, layer, slots, lengths, q, k, threads=threads)
                seconds.append(time.perf_counter() - begun)
    return Timing(point.name, tuple(seconds), 0)


def grid(bench: Bench) -> list[tuple[int, int]]:
    """(requests, context) of the points."""
    if bench.on_cuda:
        # Batches and contexts of a server; the largest is the paper's.
        return [(1, 1024), (4, 4096), (16, 16384), (16, 32768), (40, 32768), (80, 16384), (80, 32768)]
    few = [(1, 256), (1, 1024), (4, 1024), (1, 4096), (4, 4096)]
    return few if bench.quick else [*few, (1, 16384), (8, 16384), (32, 16384)]


def reading_curve(
    one_query: dict[float, tuple[float, float]], per_flop: float, dram: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Share of the DRAM rate (bytes a second) over bytes, from one query's seconds and FLOPs at each size.

    Where sizes range from a request to a whole batch, one share does not describe both; with the curve the cost model
    gives back the seconds that were measured.
    """
    at = tuple(sorted(one_query))
    shares = []
    for size in at:
        seconds, flops = one_query[size]
        rest = max(seconds - flops * per_flop, seconds / 100)
        shares.append(min(1.0, size / rest / dram))
    return tuple(shares), at


def size_curve(
    points: Sequence[Point],
    seconds: Mapping[str, float],
    bytes_of: Mapping[str, float],
    flops_of: Mapping[str, float],
    reading_s: Mapping[float, float],
    per_flop: float,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How many times ``per_flop`` a FLOP of many queries takes, over bytes; sizes that several points have, their mean.

    ``reading_s`` is what the cost model takes for the pass over so many bytes, so that it gives the measured seconds
    back.
    """
    found: dict[float, list[float]] = {}
    for point in points:
        size, whole = bytes_of[point.name], seconds[point.name]
        rest = max(whole - reading_s[size], whole / 100)
        found.setdefault(size, []).append(rest / (flops_of[point.name] * per_flop))
    at = tuple(sorted(found))
    return tuple(statistics.fmean(found[size]) for size in at), at


def split(
    points: list[Point],
    seconds: dict[str, float],
    bytes_of: dict[str, float],
    flops_of: dict[str, float],
    least_per_byte: float,
) -> tuple[float, float, dict[int, float]]:
    """Seconds of a launch, of a byte, and of a FLOP by number of queries.

    A byte cannot cost less than ``least_per_byte``, the raw rate of memory. What one query's time does not settle
    (bytes and FLOPs of one query grow together) is settled by the points with more queries.
    """
    matrix = np.array([[1.0, bytes_of[p.name], flops_of[p.name]] for p in points])
    times = np.array([seconds[p.name] for p in points])
    # Relative errors count, so that short selections are not drowned by long ones.
    weighted = matrix / times[:, None]
    scale = weighted.max(axis=0)
    solution, _ = nnls(weighted / scale, np.ones(len(points)))
    overhead, per_byte, mean = (float(v) for v in solution / scale)
    if per_byte < least_per_byte:
        per_byte = least_per_byte
        rest = np.maximum(1.0 - weighted[:, 1] * per_byte, 0.0)
        solution, _ = nnls((weighted / scale)[:, [0, 2]], rest)
        overhead, mean = float(solution[0] / scale[0]), float(solution[1] / scale[2])
    per_flop = {}
    for x in sorted({p.queries for p in points}):
        largest = max((p for p in points if p.queries == x), key=lambda p: p.rows * p.context)
        rest_s = seconds[largest.name] - overhead - per_byte * bytes_of[largest.name]
        per_flop[x] = max(rest_s / flops_of[largest.name], mean / 100, 1e-18)
    return overhead, per_byte, per_flop
