"""What rows that the device fetches lose to steps beside them, where neither ever rests.

A fetch is timed alone and while steps run all the time, in turn. It lasts longer than whatever runs beside it in a run,
so where in a step it begins averages out; its factor is of mean times, for some meet more than others do. What steps
and proxies lose depends on where they begin, so :mod:`calibration.gpu.fetching_steps` reads that off decodes. There a
fetch's time holds more than what kernels cost it. On an H200 the first of a step takes 0.2 ms longer with none beside,
too, and in one measurement fetches for 38 requests took 2.5 to 4.7 ms, by the moment and not by the layer, where they
take 2.5 alone and in whole runs; the kernels beside them took as long as in these.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from calibration.bench import Bench, Beside, Part, Value, row_of, widest
from calibration.gpu import attention, layers, load, row_fetch
from calibration.gpu.fetching_steps import batches
from calibration.gpu.graphs import captured
from calibration.other_gathers import selected_rows
from calibration.timing import Timing, Work, interleaved
from herald_exec import kernels
from herald_exec.models import BlockModel

_ROUNDS = 3
"""Times that a fetch is timed alone and then beside steps."""
_AHEAD = 2
"""Replays that are issued at once, so that the device never waits for the host."""


def measure(bench: Bench, part: Part, pool: kernels.PagedKV, context: int) -> None:
    """Time fetches from ``pool`` alone and beside steps; raw times and the factor go to ``part``."""
    # What disturbs is the question here, so nothing is refused.
    bench = replace(bench, plan=replace(bench.plan, max_spread=1e9, more=0))
    whole = bench.on_cuda and bench.shape.moe is not None
    model = bench.model if whole else layers.layers_model(bench)
    places = [(count, max(1, int(attention.SELECTED * context))) for count in batches(bench)]
    prefix = attention.Pool(bench, tuple(places))
    found: list[tuple[float, Timing, Timing]] = []
    with row_fetch.page_locked(pool):
        for count, selected in places:
            rows = selected_rows(bench, pool, count, context)
            fetch = _Stream(bench, row_fetch.case(bench, rows), first=True)
            alone, beside = _in_turn(bench, fetch, _step(bench, model, prefix, count, selected))
            found.append((float(rows.num_bytes), alone, beside))
            columns = {"rows": count, "bytes": rows.num_bytes, "times_as_long": round(longer(alone, beside), 3)}
            for timing, other in ((alone, ""), (beside, "step")):
                part.rows.append(row_of(timing, case="row_fetch", beside=other, **columns))
    part.values.append(value(found))


def longer(alone: Timing, beside: Timing) -> float:
    """How many times as long in the mean; nothing is faster for what runs beside it."""
    return max(1.0, fmean(beside.samples) / fmean(alone.samples))


def value(found: Sequence[tuple[float, Timing, Timing]]) -> Value:
    """The engine's number from (bytes, fetches alone, fetches beside steps)."""
    factors = {size: longer(alone, beside) for size, alone, beside in found}
    at = tuple(sorted(factors))
    spread = widest(timing for _, *both in found for timing in both)
    note = "beside steps, which run all the time: mean times"
    return Value("engine.row_fetch_beside_step", "x", tuple(factors[x] for x in at), at, "B", spread, note)


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


def _in_turn(bench: Bench, fetch: _Stream, step: Work) -> tuple[Timing, Timing]:
    """Fetches alone and beside ``step``, rounds of both joined."""
    steps = _Stream(bench, captured(bench, {"step": step})["step"] if bench.on_cuda else step, first=False)
    alone: list[Timing] = []
    beside: list[Timing] = []
    for _ in range(_ROUNDS):
        alone.append(fetch.time())
        with Beside((), steps):
            beside.append(fetch.time())
    return _joined("alone", alone), _joined("beside", beside)


def _joined(name: str, rounds: Sequence[Timing]) -> Timing:
    return Timing(name, tuple(seconds for timing in rounds for seconds in timing.samples), rounds[0].warmup)


def _step(bench: Bench, model: BlockModel, prefix: attention.Pool, rows: int, selected: int) -> Work:
    """Layers of a step over selected entries."""
    tokens = rows * bench.block_length
    around = layers.layer(bench, model, tokens, distinct=load.distinct_rows(bench, tokens))
    return load.passes(bench, prefix, around, rows, selected)
