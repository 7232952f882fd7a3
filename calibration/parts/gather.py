"""Gather of selected entries by context and k, on the retrieval stream's threads."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from calibration import other_gathers
from calibration.bench import TORCH_DTYPES, Bench, Part, Value, row_of, widest
from calibration.host_pool import extents, grid, host_pool, over_places
from calibration.timing import Work
from herald_exec import kernels
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB, MIB

_BUDGETS = (0.05, 0.2)
_COLD_BYTES = 512 * MIB
"""Most memory of all layers together."""
_MANY = 1 << 20
"""Entries from which a fifth of them would take more pinned memory than any ring has."""


def measure(bench: Bench) -> Part:
    """Share of the DRAM rate at which selected rows are read and written, over the bytes moved."""
    part = Part("gather")
    shape, threads = bench.shape, bench.retrieval_threads
    dim, heads = shape.head_dim, shape.num_kv_heads
    places = grid(bench)
    entry = 2 * heads * dim * bytes_per_element(bench.dram_kv_dtype, dim)
    generator = np.random.default_rng(0)
    cases: dict[str, Work] = {}
    moved: dict[str, tuple[int, int, int, float]] = {}
    with _pools(bench) as (pool, layers, fetched):
        for rows, context in places:
            for budget in _BUDGETS if rows * context < _MANY or not bench.on_cuda else _BUDGETS[:1]:
                k = max(1, int(context * budget))
                chosen = [np.sort(generator.permutation(context)[:k]).astype(np.int32) for _ in range(rows * heads)]
                indices = np.stack(chosen).reshape(rows, heads, k)
                found = kernels.Selection(
                    np.zeros(0, np.float32),
                    indices,
                    np.full((rows, heads), k, np.int32),
                    np.zeros((rows, heads), np.uint8),
                )
                out = [_ring((rows, heads, k, dim), bench) for _ in range(2)]
                name = f"{rows}x{context} k={k}"
                slot, turn = np.arange(rows), itertools.cycle(layers)
                cases[name] = lambda f=found, o=out, s=slot, t=turn: kernels.gather(
                    pool, next(t), s, f, o[0], o[1], threads=threads
                )  # type: ignore[misc]
                # Read once, written once; where the device holds another format, conversion adds its own write.
                moved[name] = (rows, context, k, 2.0 * rows * k * entry)
        bench = over_places(bench) if bench.on_cuda else bench
        timings = bench.time_host(cases)
        other_gathers.measure(bench, part, pool, layers, fetched, places)
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
    part.values.append(Value("engine.gather_dram_efficiency", "share", y, x, "B", widest(timings.values()), note))
    return part


@contextmanager
def _pools(bench: Bench) -> Iterator[tuple[kernels.PagedKV, Sequence[int], kernels.PagedKV]]:
    """KV that the host gathers from, the layers that take turns, and KV that the device reads rows of.

    What one layer leaves in the caches is gone when it comes round again, as in a pass. On a server they are places of
    the shared pool; page-locking all of that would take a minute, so the device reads a layer of its own.
    """
    shape, (slots, most) = bench.shape, extents(bench)
    size = slots * most * shape.kv_bytes_per_token_layer(bench.dram_kv_dtype)
    count = 1 if bench.on_cuda else max(1, min(shape.num_layers, int(_COLD_BYTES / size)))
    shared = host_pool(bench) if bench.on_cuda else None
    own = kernels.PagedKV(count, slots, shape.num_kv_heads, most, shape.head_dim, str(bench.dram_kv_dtype))
    with own:
        own.fill_normal()
        if shared is None:
            yield own, range(count), own
        else:
            yield shared.kv, shared.spread(bench.plan.repeats), own


def _ring(dims: tuple[int, ...], bench: Bench) -> torch.Tensor:
    """Where the executor gathers to: page-locked memory beside a GPU."""
    return torch.zeros(dims, dtype=TORCH_DTYPES[bench.dram_kv_dtype], pin_memory=bench.on_cuda)
