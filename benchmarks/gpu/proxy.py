"""What picks and fetches in a layer of ``step-fetch`` and InfiniGen, part by part: scores, choice, rows over the link.

Each part alone on the device, and the fetch under several shapes, alone and beside scores that never stop: in a run it
stands beside a step and the next layer's proxy. Host pages are drawn for one layer only.
"""

from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, timed_ms
from benchmarks.gpu.cells import Cell
from herald_exec.kernels import PagedKV
from herald_exec.models import BlockModel
from herald_exec.proxies import PartialKeys
from herald_pipeline.pipeline import build

GB = 1e9
PROGRAMS, ROWS = (32, 48, 64, 96), (16, 32, 64)
"""Shapes of the fetch: programs, and rows of K and of V that each asks for at once."""


def proxy(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Median milliseconds of a layer's parts at a context and a batch, and GB/s of the fetch by shape."""
    scores = Scores(bench, cell)
    found: dict[str, Any] = {"context": cell.context, "batch": cell.batch, "selected": scores.count}
    found["importance_ms"] = median(timed_ms(bench, scores.weigh))
    found["pick_ms"] = median(timed_ms(bench, scores.pick))
    found["sorted_pick_ms"] = median(timed_ms(bench, scores.pick_by_sorting))
    return {**found, "fetch": _fetches(bench, cell, scores)}


class Scores:
    """Partial keys of a layer and random queries for it, as a run has them; what they pick is left in ``picked``."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        settings = build(bench.shape, "step-fetch").settings
        shape, device, batch = bench.shape, bench.device, cell.batch
        one_layer: BlockModel = _OneLayer(bench)  # type: ignore[assignment]
        partial = PartialKeys(one_layer, settings.proxy_fraction, batch, cell.context)
        for slot in range(batch):
            partial.draw(0, slot, cell.context)
        self.keys, self.scale = partial.keys(0).mT, shape.head_dim**-0.5
        rows = shape.block_length * shape.num_heads // shape.num_kv_heads
        dims = (batch, shape.num_kv_heads, rows, self.keys.shape[2])
        self.queries = torch.randn(dims, device=device).to(one_layer.dtype)
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.lengths = torch.full_like(self.slots, cell.context)
        self.count = settings.selected_tokens(cell.context)
        self.counts = torch.full_like(self.slots, self.count)
        self.picked = torch.zeros(batch, shape.num_kv_heads, self.count, dtype=torch.int32, device=device)
        self.weights = self.weigh()

    def weigh(self) -> Tensor:
        """The two passes over the partial keys."""
        from herald_exec.cuda.kernels.importance import prefix_importance

        return prefix_importance(self.queries, self.keys, self.slots, self.lengths, self.scale)

    def pick(self) -> None:
        """The choice, by counting."""
        from herald_exec.cuda.kernels.picking import pick_largest

        pick_largest(self.weights, self.lengths, self.counts, self.picked)

    def pick_by_sorting(self) -> Tensor:
        """The same choice by torch, for comparison."""
        return self.weights.topk(self.count, dim=-1).indices.int().sort(dim=-1).values


class _OneLayer:
    """Of a model what partial keys ask for."""

    def __init__(self, bench: Bench) -> None:
        from dataclasses import replace

        self.shape, self.device = replace(bench.shape, num_layers=1), bench.device
        self.dtype = torch.bfloat16 if bench.on_cuda else torch.float32


def _fetches(bench: Bench, cell: Cell, scores: Scores) -> list[dict[str, Any]]:
    """Each shape of the fetch: GB/s alone, and beside the scores."""
    from herald_exec.cuda.fetched import page_lock
    from herald_exec.cuda.kernels.rows import fetch_rows

    shape, batch, on_cuda = bench.shape, cell.batch, bench.on_cuda
    kv = PagedKV(1, batch, shape.num_kv_heads, cell.context, shape.head_dim, bench.kv_dtype)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    dims = (batch, shape.num_kv_heads, scores.count, shape.head_dim)
    target = (torch.zeros(dims, dtype=dtype, device=bench.device), torch.zeros(dims, dtype=dtype, device=bench.device))
    told = torch.tensor(np.array([range(batch), range(batch), [scores.count] * batch], np.int32), device=bench.device)
    moved = 2 * target[0].nbytes
    locked, found = 0, []
    try:
        kv.fill_normal(0, bench.threads(cell))
        locked = page_lock(kv.address, kv.nbytes) if on_cuda else 0
        scores.pick()
        strides = (kv.pages.strides[1], kv.pages.strides[2])
        for programs, at_once in product(PROGRAMS, ROWS):

            def fetch(programs: int = programs, at_once: int = at_once) -> None:
                shaped = {"programs": programs, "at_once": at_once}
                fetch_rows(kv.address, told, scores.picked, target, *strides, **shaped)

            each: dict[str, Any] = {"programs": programs, "rows": at_once}
            each["gb_s"] = moved / median(timed_ms(bench, fetch)) / 1e6
            if on_cuda:
                each["beside_gb_s"] = moved / _beside_ms(bench, fetch, scores) / 1e6
            found.append(each)
    finally:
        if locked:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(locked)  # type: ignore[no-untyped-call]
        kv.close()
    return found


def _beside_ms(bench: Bench, fetch: Any, scores: Scores, repeats: int = 8) -> float:
    """Milliseconds of a fetch on a stream of high priority while another one computes scores all the time."""
    main, link = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    alone_ms = median(timed_ms(bench, fetch))
    weigh_ms = median(timed_ms(bench, scores.weigh))
    with torch.cuda.stream(main):
        # Longer than the fetches, were each to take three times as long as alone.
        for _ in range(3 + int(3 * (repeats + 3) * alone_ms / weigh_ms)):
            scores.weigh()
    with torch.cuda.stream(link):
        times = timed_ms(bench, fetch, repeats)
    torch.cuda.synchronize()
    return median(times)
