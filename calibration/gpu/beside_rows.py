"""What a step, or a proxy, and rows that the device fetches beside it cost each other where neither ever rests.

A fetch goes before the kernels of a step (:data:`~herald_pipeline.parts.FETCH`): its programs hold multiprocessors for
as long as it lasts, and kernels have the others. Both are timed alone and while the other runs all the time, in turn. A
step is the layers of the model with attention to selected entries; a proxy is its whole stage, one layer's. These rows
say whether it is the neighbour that costs what :mod:`calibration.gpu.fetching_steps` finds in runs.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from calibration.bench import Bench, Beside, Part, row_of
from calibration.gpu import attention, layers, load, row_fetch
from calibration.gpu.graphs import captured
from calibration.other_gathers import selected_rows
from calibration.timing import Timing, Work, interleaved
from herald_exec import kernels
from herald_exec.models import BlockModel
from herald_pipeline.settings import Settings

_ROUNDS = 3
"""Times that everything is timed alone and then beside the other."""
_AHEAD = 2
"""Fetches, or replays, that are issued at once, so that the device never waits for the host."""


def batches(bench: Bench) -> tuple[int, ...]:
    """Requests of a fetch and of the steps beside it."""
    return (4, 16, 38) if bench.on_cuda else (1, 2)


def measure(bench: Bench, part: Part, pool: kernels.PagedKV, context: int) -> None:
    """Time fetches from ``pool`` and kernels, alone and beside each other; raw times go to ``part``."""
    # What disturbs is the question here, so nothing is refused.
    bench = replace(bench, plan=replace(bench.plan, max_spread=1e9, more=0))
    whole = bench.on_cuda and bench.shape.moe is not None
    model = bench.model if whole else layers.layers_model(bench)
    places = [(count, max(1, int(attention.SELECTED * context))) for count in batches(bench)]
    prefix = attention.Pool(bench, tuple(places))
    with row_fetch.page_locked(pool):
        for count, selected in places:
            rows = selected_rows(bench, pool, count, context)
            fetch = _Stream(bench, row_fetch.case(bench, rows), first=True)
            works = {
                "step": _step(bench, model, prefix, count, selected),
                "proxy": proxy(bench, model, count, context, selected),
            }
            main = captured(bench, works) if bench.on_cuda else works
            beside = _kernels_beside(bench, main, fetch)
            each = _fetch_beside(bench, main, fetch)
            for case, pairs, beside_what in (("kernels", beside, "row fetch"), ("row_fetch", each, "")):
                for name, pair in pairs.items():
                    columns = {"rows": count, "bytes": rows.num_bytes, "times_as_long": round(pair.longer, 3)}
                    what, other = (name, beside_what) if case == "kernels" else (case, name)
                    for timing, runs in ((pair.timings[0], ""), (pair.timings[1], other)):
                        part.rows.append(row_of(timing, case=what, beside=runs, **columns))


class _Pair:
    """Work alone and beside another: rounds of both in turn."""

    def __init__(self, rounds: list[tuple[Timing, Timing]]) -> None:
        alone, beside = (tuple(s for pair in rounds for s in pair[i].samples) for i in (0, 1))
        warmup = rounds[0][0].warmup
        self.timings = (Timing("alone", alone, warmup), Timing("beside", beside, warmup))
        self.alone = self.timings[0].seconds
        self.longer = median(beside.seconds / alone.seconds for alone, beside in rounds)


class _Stream:
    """Work again and again on a stream of its own, ``first`` before that of others, a few calls of it under way."""

    def __init__(self, bench: Bench, work: Work, *, first: bool) -> None:
        self.bench, self.work = bench, work
        self._stream = torch.cuda.Stream(bench.device, priority=-first) if bench.on_cuda else None  # type: ignore[no-untyped-call]
        self._sent: deque[Any] = deque()
        if bench.on_cuda:
            torch.cuda.synchronize(bench.device)  # what the work reads is there
        with self.on():
            work()  # compiled by now

    def on(self) -> AbstractContextManager[Any]:
        """The stream as the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def __call__(self) -> None:
        with self.on():
            self.work()
            if self._stream is None:
                return
            passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            passed.record()
        self._sent.append(passed)
        if len(self._sent) > _AHEAD:
            self._sent.popleft().synchronize()

    def time(self) -> Timing:
        """Samples of one call on this stream."""
        with torch.inference_mode(), self.on():
            return interleaved({"": self.work}, self.bench.plan, self.bench.clock)[""]


def _kernels_beside(bench: Bench, main: Mapping[str, Work], fetch: _Stream) -> dict[str, _Pair]:
    rounds: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in main}
    for _ in range(_ROUNDS):
        alone = bench.time(main)
        with Beside((), fetch):
            beside = bench.time(main)
        for name in main:
            rounds[name].append((alone[name], beside[name]))
    return {name: _Pair(found) for name, found in rounds.items()}


def _fetch_beside(bench: Bench, main: Mapping[str, Work], fetch: _Stream) -> dict[str, _Pair]:
    found = {}
    for name, work in main.items():
        runs, rounds = _Stream(bench, work, first=False), []
        for _ in range(_ROUNDS):
            alone = fetch.time()
            with Beside((), runs):
                rounds.append((alone, fetch.time()))
        found[name] = _Pair(rounds)
    return found


def _step(bench: Bench, model: BlockModel, prefix: attention.Pool, rows: int, selected: int) -> Work:
    """Layers of a step over selected entries."""
    tokens = rows * bench.block_length
    around = layers.layer(bench, model, tokens, distinct=load.distinct_rows(bench, tokens))
    return load.passes(bench, prefix, around, rows, selected)


def proxy(bench: Bench, model: BlockModel, rows: int, context: int, selected: int) -> Callable[[], torch.Tensor]:
    """A proxy's stage in one layer: speculated queries, scores over partial keys, what picks by them."""
    from herald_exec.cuda.kernels.importance import prefix_importance
    from herald_exec.cuda.kernels.picking import pick_largest
    from herald_exec.cuda.kernels.placing import place_heads

    shape, weights, device = model.shape, model.weights.layers[0], bench.device
    tokens, heads = rows * bench.block_length, (shape.num_heads, shape.num_kv_heads)
    entered = bench.random(tokens, shape.hidden_size)
    rotary = model.rotary(torch.arange(tokens, device=device))
    width = max(1, round(Settings().proxy_fraction * shape.head_dim))
    columns = bench.random(rows, shape.num_kv_heads, shape.head_dim, width)
    keys = bench.random(rows, shape.num_kv_heads, width, context)  # column by column, as they lie in a run
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    lengths, counts = torch.full_like(slots, context), torch.full_like(slots, selected)
    picked = torch.zeros(rows, shape.num_kv_heads, selected, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        normed = functional.linear(entered, weights.qkv, weights.qkv_bias)
        q, _, _ = place_heads(normed, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, rows, heads)
        queries = q @ columns[slots.long()]
        pick_largest(prefix_importance(queries, keys, slots, lengths, shape.head_dim**-0.5), lengths, counts, picked)
        return picked

    return run
