"""Gather of selected entries by context and k, on the retrieval stream's threads."""

import numpy as np

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.parts.selection import grid
from calibration.timing import Work
from herald_exec import kernels
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB

_BUDGETS = (0.05, 0.2)


def measure(bench: Bench) -> Part:
    """Share of the DRAM rate at which selected rows are read and written, over the bytes moved."""
    part = Part("gather")
    shape, threads = bench.shape, bench.retrieval_threads
    dim, heads = shape.head_dim, shape.num_kv_heads
    places = grid(bench)
    entry = 2 * heads * dim * bytes_per_element(bench.dram_kv_dtype, dim)
    slots, most = max(rows for rows, _ in places), max(context for _, context in places)
    generator = np.random.default_rng(0)
    cases: dict[str, Work] = {}
    moved: dict[str, tuple[int, int, int, float]] = {}
    with kernels.PagedKV(1, slots, heads, most, dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
        storage = kernels.storage_dtype(str(bench.dram_kv_dtype))
        for rows, context in places:
            for budget in _BUDGETS:
                k = max(1, int(context * budget))
                chosen = [np.sort(generator.permutation(context)[:k]).astype(np.int32) for _ in range(rows * heads)]
                indices = np.stack(chosen).reshape(rows, heads, k)
                found = kernels.Selection(
                    np.zeros(0, np.float32),
                    indices,
                    np.full((rows, heads), k, np.int32),
                    np.zeros((rows, heads), np.uint8),
                )
                out = [np.zeros((rows, heads, k, dim), storage) for _ in range(2)]
                name = f"{rows}x{context} k={k}"
                slot = np.arange(rows)
                cases[name] = lambda f=found, o=out, s=slot: kernels.gather(pool, 0, s, f, o[0], o[1], threads=threads)  # type: ignore[misc]
                # Read once, written once; where the device holds another format, conversion adds its own write.
                moved[name] = (rows, context, k, 2.0 * rows * k * entry)
        timings = bench.time_host(cases)
    dram = bench.rate("machine.dram.read_gb_s", "dram") * GB
    curve: dict[float, list[float]] = {}
    for name, (rows, context, k, size) in moved.items():
        share = min(1.0, size / timings[name].seconds / dram)
        curve.setdefault(size, []).append(share)
        gb_s = round(size / timings[name].seconds / GB, 3)
        part.rows.append(row_of(timings[name], rows=rows, context=context, k=k, threads=threads, bytes=size, gb_s=gb_s))
    x = tuple(sorted(curve))
    y = tuple(sum(curve[size]) / len(curve[size]) for size in x)
    note = f"{threads} thread(s), bytes read and written, KV in {bench.dram_kv_dtype}"
    part.values = [Value("engine.gather_dram_efficiency", "share", y, x, "B", widest(timings.values()), note)]
    return part
