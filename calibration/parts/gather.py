"""Gather of selected entries by context and k, on the retrieval stream's threads."""

import itertools

import numpy as np
import torch

from calibration import other_gathers
from calibration.bench import TORCH_DTYPES, Bench, Part, Value, row_of, widest
from calibration.parts.selection import grid
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
    slots, most = max(rows for rows, _ in places), max(context for _, context in places)
    generator = np.random.default_rng(0)
    cases: dict[str, Work] = {}
    moved: dict[str, tuple[int, int, int, float]] = {}
    layers = _layers(bench, slots * most * entry)
    turn = itertools.cycle(range(layers))
    with kernels.PagedKV(layers, slots, heads, most, dim, str(bench.dram_kv_dtype)) as pool:
        pool.fill_normal()
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
                slot = np.arange(rows)
                cases[name] = lambda f=found, o=out, s=slot: kernels.gather(
                    pool, next(turn), s, f, o[0], o[1], threads=threads
                )  # type: ignore[misc]
                # Read once, written once; where the device holds another format, conversion adds its own write.
                moved[name] = (rows, context, k, 2.0 * rows * k * entry)
        timings = bench.time_host(cases)
        other_gathers.measure(bench, part, pool, places)
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


def _layers(bench: Bench, layer_bytes: float) -> int:
    """Layers that take turns, as in a pass: what one leaves in the caches is gone when it comes round again."""
    return 1 if bench.on_cuda else max(1, min(bench.shape.num_layers, int(_COLD_BYTES / layer_bytes)))


def _ring(dims: tuple[int, ...], bench: Bench) -> torch.Tensor:
    """Where the executor gathers to: page-locked memory beside a GPU."""
    return torch.zeros(dims, dtype=TORCH_DTYPES[bench.dram_kv_dtype], pin_memory=bench.on_cuda)
