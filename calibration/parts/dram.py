"""Host memory: how fast it streams, by number of threads, and on a server by place.

A server's rate is that of a run's pool: the median of reading layers all over it (:mod:`calibration.host_pool`). The
raw table has every place's, a stretch that is read again and again (what a probe beside a run reads), and the seconds
in which each place was first written.
"""

import statistics
from collections.abc import Mapping
from itertools import cycle

from calibration.bench import Bench, Part, Row, Value, row_of
from calibration.host_pool import BY_PLACE, HostPool, host_pool, over_places
from calibration.timing import Timing, Work, spread
from herald_exec import kernels
from herald_pipeline.units import GB, MIB

_STRETCH_BYTES, _PROBE_BYTES = 4096 * MIB, 1024 * MIB
"""Of a layer, what is read by number of threads: far more than a server's last-level cache; and what a probe reads."""
_ROUNDS, _PROBES = 3, 5
"""Over all places with the best number of threads; reads of a probe."""


def measure(bench: Bench) -> Part:
    """One sequential read of memory far larger than the caches, with 1, 2, 4, .. threads."""
    cores = sorted({*bench.main_cores, *bench.retrieval_cores})
    counts = thread_counts(len(cores))
    part = Part("dram")
    if bench.on_cuda:
        return _over_places(bench, part, counts)
    size = 128 * MIB if bench.quick else 1024 * MIB
    with kernels.PagedKV(1, 1, 1, size // (2 * 128 * 2), 128, "bf16") as pool:
        pool.fill_normal()

        def read(threads: int) -> None:
            kernels.pool_read_gb_s(pool, threads)

        timings = bench.time_anywhere({str(n): lambda n=n: read(n) for n in counts})  # type: ignore[misc]
        best = _rates(part, timings, counts, pool.nbytes)
    timing = timings[str(best)]
    note = f"{best} thread(s), tier {kernels.active_tier()}"
    rate = pool.nbytes / timing.seconds / GB
    part.values = [Value("machine.dram.read_gb_s", "GB/s", rate, spread=timing.spread, note=note)]
    return part


def _rates(part: Part, timings: Mapping[str, Timing], counts: list[int], size: int) -> int:
    """Rows by number of threads; which number was the fastest."""
    rates = {n: size / timings[str(n)].seconds / GB for n in counts}
    part.rows += [row_of(timings[str(n)], threads=n, bytes=size, gb_s=round(rates[n], 3)) for n in counts]
    return max(rates, key=rates.__getitem__)


def _over_places(bench: Bench, part: Part, counts: list[int]) -> Part:
    pool = host_pool(bench)
    size = min(pool.layer_bytes, _STRETCH_BYTES)
    places = pool.spread(bench.plan.repeats)
    timings = over_places(bench).time_anywhere({str(n): _in_turn(pool, places, n, size) for n in counts})
    best = _rates(part, timings, counts, size)
    seconds: dict[int, list[float]] = {layer: [] for layer in range(pool.kv.num_layers)}
    for _ in range(_ROUNDS):
        for layer, samples in seconds.items():
            samples.append(pool.read_seconds(layer, best))
    rates = {layer: pool.layer_bytes / statistics.median(samples) / GB for layer, samples in seconds.items()}
    part.rows += [_row(pool, BY_PLACE, layer, samples) for layer, samples in seconds.items()]
    probe = min(pool.layer_bytes, _PROBE_BYTES)
    again = [pool.read_seconds(0, best, probe) for _ in range(_PROBES)]
    part.rows.append(_row(pool, "a stretch again and again, as a probe beside a run reads", 0, again, probe))
    part.rows += pool.written_rows()
    note = (
        f"{best} thread(s), tier {kernels.active_tier()}; median of {len(rates)} places in {pool.kv.nbytes / GB:.0f} "
        f"GB: best {max(rates.values()):.1f} at {pool.place_gb(max(rates, key=rates.__getitem__)):.0f} GB, worst "
        f"{min(rates.values()):.1f} at {pool.place_gb(min(rates, key=rates.__getitem__)):.0f} GB"
    )
    rate, differ = statistics.median(rates.values()), round(spread(tuple(rates.values())), 4)
    part.values = [Value("machine.dram.read_gb_s", "GB/s", rate, spread=differ, note=note)]
    return part


def _in_turn(pool: HostPool, places: tuple[int, ...], threads: int, size: int) -> Work:
    turn = cycle(places)
    return lambda: pool.read_seconds(next(turn), threads, size)


def _row(pool: HostPool, case: str, layer: int, seconds: list[float], size: int | None = None) -> Row:
    """Without a number of threads: rows with one are read as times by threads."""
    size = size or pool.layer_bytes
    timing = Timing(case, tuple(seconds), 0)
    gb_s = round(size / timing.seconds / GB, 3)
    place = {"layer": layer, "place_gb": round(pool.place_gb(layer), 2)}
    return row_of(timing, case=case, **place, bytes=size, gb_s=gb_s)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, .. and all cores."""
    counts = [1]
    while counts[-1] * 2 < cores:
        counts.append(counts[-1] * 2)
    return [*counts, cores] if cores > 1 else counts
