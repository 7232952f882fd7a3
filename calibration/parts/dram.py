"""Host memory: how fast it streams, by number of threads."""

from calibration.bench import Bench, Part, Value, row_of
from herald_exec import kernels
from herald_pipeline.units import GB, MIB


def measure(bench: Bench) -> Part:
    """One sequential read of a buffer far larger than the caches, with 1, 2, 4, .. threads."""
    cores = sorted({*bench.main_cores, *bench.retrieval_cores})
    counts = thread_counts(len(cores))
    part = Part("dram")
    # A server's last-level cache holds hundreds of megabytes.
    size = 4096 * MIB if bench.on_cuda else 128 * MIB if bench.quick else 1024 * MIB
    with kernels.PagedKV(1, 1, 1, size // (2 * 128 * 2), 128, "bf16") as pool:
        pool.fill_normal()

        def read(threads: int) -> None:
            kernels.pool_read_gb_s(pool, threads)

        timings = bench.time_anywhere({str(n): lambda n=n: read(n) for n in counts})  # type: ignore[misc]
        rates = {n: pool.nbytes / timings[str(n)].seconds / GB for n in counts}
        part.rows = [row_of(timings[str(n)], threads=n, bytes=pool.nbytes, gb_s=round(rates[n], 3)) for n in counts]
    best = max(rates, key=rates.__getitem__)
    spread = timings[str(best)].spread
    note = f"{best} thread(s), tier {kernels.active_tier()}"
    part.values = [Value("machine.dram.read_gb_s", "GB/s", rates[best], spread=spread, note=note)]
    return part


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, .. and all cores."""
    counts = [1]
    while counts[-1] * 2 < cores:
        counts.append(counts[-1] * 2)
    return [*counts, cores] if cores > 1 else counts
