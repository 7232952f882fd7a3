"""CPU selection by context, queries and threads, split into what each KV byte and each query row costs.

The time is ``overhead + bytes / (share x DRAM rate) + FLOPs / (share x attention rate)``: the two sums that the cost
model adds. Overhead and the cost of a byte are found by non-negative least squares over all points, weighted by their
size; what is left is the cost of a FLOP, by number of queries. On a server that is the largest selection's: smaller
ones with a block's queries take longer for a FLOP, because threads share heads, and a curve over bytes says how much.

Where a pool lies in memory decides up to a tenth of the time, whatever reads it, and on one virtual machine up to a
third: the layers of a run's 107 GB were scanned at 82 to 127 GB/s. So on a server calls go round places at even
distances in most of host memory (:mod:`calibration.host_pool`), and the median is that of these. Every place is
selected over and read plainly: the raw table tells whether a read shows what place does to a scan, and the profile
states the reads, which a run's own are held against. What many queries are bound by moves as well: the rate of the
widest arithmetic alone, and selections that runs of many queries are timed beside, too, are taken before and after.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from calibration import fewer_bytes
from calibration.bench import Bench, Part, Row, Value, pinned, row_of, widest
from calibration.host_pool import BY_PLACE, HostPool, extents, grid, host_pool, over_places
from calibration.timing import Timing
from herald_exec import kernels
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB

_ROUNDS = 3
"""Over all places of a server's pool."""


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
    entry = 2 * shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.dram_kv_dtype, shape.head_dim)
    generator = np.random.default_rng(0)
    dram = bench.rate("machine.dram.read_gb_s", "dram") * GB
    per_flop: dict[int, float] = {}
    largest = max(points, key=lambda p: (p.queries == 1, p.rows * p.context))
    with _pool(bench) as (pool, layers):

        def case(point: Point, count: int = threads):  # type: ignore[no-untyped-def]  # noqa: ANN202
            q = generator.standard_normal(
                (point.rows, point.queries, shape.num_heads, shape.head_dim), dtype=np.float32
            )
            slot = np.arange(point.rows)
            lengths = np.full(point.rows, point.context)
            k, turn = np.full(point.rows, max(1, point.context // 20)), cycle(layers)
            return lambda layer=None: kernels.select(
                pool, next(turn) if layer is None else layer, slot, lengths, q, k, threads=count
            )

        tolerant = over_places(bench) if bench.on_cuda else bench
        before = _arithmetic(bench)
        timings = tolerant.time_host({point.name: case(point) for point in points})
        rates = [rate for rate in (before, _arithmetic(bench)) if rate is not None]
        by_threads, of_threads = {}, _of_threads(points, largest) if bench.on_cuda else largest
        if threads > 1:
            counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < threads]
            once = replace(tolerant, plan=replace(tolerant.plan, warmup=1))
            by_threads = once.time_host({f"{n} threads": case(of_threads, n) for n in counts})
        by_place = _by_place(bench, case(largest)) if bench.on_cuda else {}
        in_place = _in_place(bench, pool, layers, next((p for p in points if p.name == _IN_PLACE), None))
        add_fewer_bytes = fewer_bytes.measure(tolerant, part, pool, layers, grid(bench), lambda: per_flop[1], dram)
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
    for rate in rates:
        part.rows += [
            {"case": "arithmetic", "unit": rate.unit, "tflop_s": round(rate.tflop_s, 3)},
            {"case": "many queries", "queries": bench.block_length, "gb_s": round(rate.many_queries_gb_s, 3)},
        ]
    for name, timing in by_threads.items():
        columns = {"rows": of_threads.rows, "context": of_threads.context, "queries": 1}
        part.rows.append(row_of(timing, **columns, threads=int(name.split()[0])))
    for layer, (selected, read) in by_place.items():
        part.rows.append(_place_row(host_pool(bench), layer, selected, read))
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
    if rates:
        when = "mean of right before the selections and right after"
        peak, queries_gb_s = (statistics.fmean(each) for each in zip(*[rate[1:] for rate in rates], strict=True))
        unit = f"{threads} thread(s), unit {rates[0].unit}, {when}"
        part.values.append(Value("machine.cpu.peak_tflop_s", "TFLOP/s", peak, note=unit))
        what = f"{threads} thread(s), {bench.block_length} queries, {when}"
        part.values.append(Value("machine.cpu.many_queries_gb_s", "GB/s", queries_gb_s, note=what))
    if by_place:
        part.values.append(_read_by_place(host_pool(bench), by_place, threads))
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


@contextmanager
def _pool(bench: Bench) -> Iterator[tuple[kernels.PagedKV, Sequence[int]]]:
    """KV that holds every point, and the layers that calls go round: on a server those of the shared pool."""
    if bench.on_cuda:
        shared = host_pool(bench)
        yield shared.kv, shared.spread(bench.plan.repeats)
        return
    shape, (slots, most) = bench.shape, extents(bench)
    with kernels.PagedKV(1, slots, shape.num_kv_heads, most, shape.head_dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
        yield pool, (0,)


class _Arithmetic(NamedTuple):
    """The kernels' widest unit and what it reaches, and what the work of a block's queries allows, now."""

    unit: str
    tflop_s: float
    many_queries_gb_s: float


def _arithmetic(bench: Bench) -> _Arithmetic | None:
    """What selections of many queries are bound by, on a server."""
    if not bench.on_cuda:
        return None
    shape, threads = bench.shape, bench.retrieval_threads
    with pinned(bench.retrieval_cores):
        fastest = kernels.widest_unit_tflop_s(threads)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return fastest and _Arithmetic(*fastest, kernels.many_queries_gb_s(*heads, bench.block_length, threads))


def _of_threads(points: Sequence[Point], largest: Point) -> Point:
    """The point that is timed by threads: half of the largest, of which a single thread takes a second and more."""
    half = [p for p in points if p.queries == 1 and 2 * p.rows * p.context <= largest.rows * largest.context]
    return max(half, key=lambda p: (p.rows * p.context, p.context))


def _by_place(bench: Bench, select: Callable[[int], object]) -> dict[int, tuple[list[float], list[float]]]:
    """Layer -> seconds of selecting over it, and of a plain read of it, one right behind the other."""
    pool, threads = host_pool(bench), bench.retrieval_threads
    found: dict[int, tuple[list[float], list[float]]] = {layer: ([], []) for layer in range(pool.kv.num_layers)}
    with pinned(bench.retrieval_cores):
        for _ in range(_ROUNDS):
            for layer, (selected, read) in found.items():
                read.append(pool.read_seconds(layer, threads))
                begun = time.perf_counter()
                select(layer)
                selected.append(time.perf_counter() - begun)
    return found


def _read_by_place(pool: HostPool, by_place: Mapping[int, tuple[list[float], list[float]]], threads: int) -> Value:
    """Rates of plain reads right beside the selections, over the middle of each place."""
    rates = tuple(pool.layer_bytes / statistics.median(read) / GB for _, read in by_place.values())
    middles = tuple(round(pool.place_gb(layer) + pool.layer_bytes / GB / 2, 2) for layer in by_place)
    differ, note = (
        round(Timing(BY_PLACE, rates, 0).spread, 4),
        f"{threads} thread(s), medians of {_ROUNDS} reads a place",
    )
    return Value("machine.dram.beside_selections_gb_s", "GB/s", rates, middles, "GB", differ, note)


def _place_row(pool: HostPool, layer: int, selected: list[float], read: list[float]) -> Row:
    """Without a number of threads: rows with one are read as times by threads."""
    timing, size = Timing(BY_PLACE, tuple(selected), 0), pool.layer_bytes
    rates = {"gb_s": size / timing.seconds / GB, "read_gb_s": size / statistics.median(read) / GB}
    where = {"case": BY_PLACE, "layer": layer, "place_gb": round(pool.place_gb(layer), 2), "bytes": size}
    return row_of(timing, **where, **{name: round(rate, 3) for name, rate in rates.items()})


_IN_PLACE = "16x32768 x=32"
_REST_S = 0.003
"""Between the selections of two layers of ``mage-cpu``: the device finishes one layer and projects the next."""


def _in_place(bench: Bench, pool: kernels.PagedKV, layers: Sequence[int], point: Point | None) -> Timing | None:
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
            for layer in layers:
                time.sleep(_REST_S)
                begun = time.perf_counter()
                kernels.select(pool, layer, slots, lengths, q, k, threads=threads)
                seconds.append(time.perf_counter() - begun)
    return Timing(point.name, tuple(seconds), 0)


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
