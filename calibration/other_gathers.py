"""The other ways to bring selected rows together: by a selection's own workers, and by the device itself.

``gather=fused``: what the copy adds to a selection, whose workers make it right behind their top-k. ``gather=gpu``: the
device reads rows of page-locked host memory and puts them into its pool; without a GPU, as the plain action does, by a
gather and a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from calibration.bench import TORCH_DTYPES, Bench, Part, Value, row_of, widest
from calibration.timing import Timing, Work
from herald_exec import kernels
from herald_pipeline.units import GB

SELECTED = 20
"""One of so many entries is selected: the budget of 5%."""
Place = tuple[int, int]
"""Requests, and entries of each."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Selected rows of one layer: the indices, and buffers in host memory that hold as many."""

    pool: kernels.PagedKV
    slots: np.ndarray
    indices: np.ndarray
    buffers: tuple[torch.Tensor, torch.Tensor]

    @property
    def num_bytes(self) -> float:
        """Bytes of K and V that are moved."""
        return float(sum(part.numel() * part.element_size() for part in self.buffers))


def measure(
    bench: Bench,
    part: Part,
    pool: kernels.PagedKV,
    layers: Sequence[int],
    fetched: kernels.PagedKV,
    places: Sequence[Place],
) -> None:
    """Time both over ``places`` and add what they reach to ``part``.

    Selections go round ``layers`` of ``pool``; the device reads rows of ``fetched``.
    """
    sizes = {f"{rows}x{context}": selected_rows(bench, fetched, rows, context) for rows, context in places}
    contexts = {f"{rows}x{context}": context for rows, context in places}
    cases = {}
    for name, found in sizes.items():
        for case, copies in ((name, False), (f"{name} fused", True)):
            cases[case] = _select(bench, pool, layers, found, contexts[name], copies=copies)
    _fused(bench, part, sizes, bench.time_host(cases))
    _read_by_the_device(bench, part, fetched, sizes)


def selected_rows(bench: Bench, pool: kernels.PagedKV, rows: int, context: int) -> Rows:
    """Rows of one layer for ``rows`` requests, picked at random."""
    generator = np.random.default_rng(0)
    heads, k = pool.num_kv_heads, max(1, context // SELECTED)
    chosen = [np.sort(generator.permutation(context)[:k]).astype(np.int32) for _ in range(rows * heads)]
    dims, dtype = (rows, heads, k, pool.head_dim), TORCH_DTYPES[bench.dram_kv_dtype]
    keys, values = (torch.zeros(dims, dtype=dtype, pin_memory=bench.on_cuda) for _ in "kv")
    return Rows(pool, np.arange(rows), np.stack(chosen).reshape(rows, heads, k), (keys, values))


# By the selection's workers ------------------------------------------------------------------------------------------


def _select(
    bench: Bench, pool: kernels.PagedKV, layers: Sequence[int], rows: Rows, context: int, *, copies: bool
) -> Callable[[], object]:
    shape, count = bench.shape, len(rows.slots)
    q = np.random.default_rng(0).standard_normal((count, 1, shape.num_heads, shape.head_dim), dtype=np.float32)
    lengths, budget = np.full(count, context), np.full(count, rows.indices.shape[2])
    into, threads, turn = rows.buffers if copies else None, bench.retrieval_threads, cycle(layers)
    return lambda: kernels.select(pool, next(turn), rows.slots, lengths, q, budget, gathered=into, threads=threads)


def _fused(bench: Bench, part: Part, sizes: Mapping[str, Rows], timings: Mapping[str, Timing]) -> None:
    dram = bench.rate("machine.dram.read_gb_s", "dram") * GB
    shares: dict[float, list[float]] = {}
    for name, rows in sizes.items():
        moved = 2 * rows.num_bytes  # read once, written once
        timing, alone = timings[f"{name} fused"], timings[name]
        # Rows that are still in a cache cost less than a read of memory; the description counts them all the same.
        added = max(timing.seconds - alone.seconds, moved / dram)
        shares.setdefault(moved, []).append(moved / added / dram)
        columns = {"places": name, "bytes": moved, "threads": bench.retrieval_threads}
        part.rows.append(row_of(timing, case="select and gather", **columns, alone_s=alone.seconds, added_s=added))
    at = tuple(sorted(shares))
    share = tuple(sum(shares[x]) / len(shares[x]) for x in at)
    note = f"{bench.retrieval_threads} thread(s): what the copy adds to a selection, over bytes read and written"
    part.values.append(
        Value("engine.fused_gather_dram_efficiency", "share", share, at, "B", widest(timings.values()), note)
    )


# By the device -------------------------------------------------------------------------------------------------------


def _read_by_the_device(bench: Bench, part: Part, pool: kernels.PagedKV, sizes: Mapping[str, Rows]) -> None:
    if bench.on_cuda:
        from calibration.gpu import row_fetch

        timings = row_fetch.timings(bench, pool, sizes)
    else:
        timings = bench.time_host({name: _gather_and_copy(bench, rows) for name, rows in sizes.items()})
    link = bench.rate("machine.link.h2d_gb_s", "copies")
    shares: dict[float, list[float]] = {}
    for name, rows in sizes.items():
        gb_s = rows.num_bytes / timings[name].seconds / GB
        shares.setdefault(rows.num_bytes, []).append(min(1.0, gb_s / link))
        columns = {"places": name, "bytes": rows.num_bytes, "gb_s": round(gb_s, 3)}
        part.rows.append(row_of(timings[name], case="read by the device", **columns))
    at = tuple(sorted(shares))
    share = tuple(sum(shares[x]) / len(shares[x]) for x in at)
    note = "rows of page-locked pages, read by the device" if bench.on_cuda else "a gather and a copy: no bus"
    spread = widest(timings.values())
    part.values.append(Value("engine.row_fetch_efficiency", "share", share, at, "B", spread, note))
    if bench.on_cuda:
        # What picks rows on the device (InfiniGen) has them fetched by the same kernel, and by no gather before a copy.
        part.values.append(Value("engine.scattered_copy_efficiency", "share", share, at, "B", spread, note))


def _gather_and_copy(bench: Bench, rows: Rows) -> Work:
    count, heads, k = rows.indices.shape
    counts, status = np.full((count, heads), k, np.int32), np.zeros((count, heads), np.uint8)
    found = kernels.Selection(np.zeros(0, np.float32), rows.indices, counts, status)
    targets = [torch.zeros_like(part) for part in rows.buffers]

    def run() -> None:
        kernels.gather(rows.pool, 0, rows.slots, found, *rows.buffers, threads=bench.retrieval_threads)
        for target, source in zip(targets, rows.buffers, strict=True):
            target.copy_(source)

    return run
