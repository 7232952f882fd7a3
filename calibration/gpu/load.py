"""Layers again and again: how much longer a pass takes where the device never rests than where it does.

A card at its power limit lowers its clock. The other parts time work in samples with rests between them, HERALD leaves
the device idle for most of a block, and Dense never does. A pass is what a step of full attention is made of: the
model's layers, experts included, each with its attention to KV of its own in a pool that fills memory. (Attention and
dense products alone take more power than steps do: 12% slower under load where steps are 9%.) A pass over selected
entries takes less power again: it reads the exact layers in full and the budget of the others, as ``ideal``'s steps do.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from calibration.bench import Bench, Part, Value, row_of
from calibration.gpu import attention, layers
from calibration.gpu.graphs import captured
from calibration.timing import Timing, Work
from herald_exec.models import BlockModel
from herald_pipeline.pipeline import build

LOAD_S, REST_S, BUSY_SHARE = 2.5, 1.2, 0.3
"""Seconds without and with rests, and the share of the time that passes with rests take."""
Place = tuple[int, int]
"""Requests, and entries of each."""


def sizes(bench: Bench) -> tuple[Place, ...]:
    """(requests, prefix): Dense's batches at 32K, from what one small card holds to the largest."""
    return ((4, 32768), (16, 32768), (38, 32768), (80, 32768)) if bench.on_cuda else ((1, 64), (2, 64))


def sparse_sizes(bench: Bench) -> tuple[Place, ...]:
    """(requests, context) of passes over selected entries: HERALD's batches at 32K."""
    return ((16, 32768), (80, 32768)) if bench.on_cuda else ((1, 64), (2, 64))


def measure(bench: Bench, part: Part) -> None:
    """Time with rests over time without, by token rows of a pass: of full attention, then over selected entries."""
    whole = bench.on_cuda and bench.shape.moe is not None
    model = bench.model if whole else layers.layers_model(bench)
    full, sparse = sizes(bench), sparse_sizes(bench)
    pool = attention.Pool(bench, (*full, *sparse))
    path = "engine.constant_load_efficiency"
    for name, places, attended in ((path, full, full_attention), (f"{path}_sparse", sparse, selected_entries)):
        works = {place: attended(bench, pool, *place) for place in places}
        part.values.append(_share(bench, part, name, model, works))


def _share(bench: Bench, part: Part, path: str, model: BlockModel, attended: Mapping[Place, Work]) -> Value:
    """The quantity at ``path``, from passes of all layers with what they attend to, by place."""
    kind = "selected entries" if path.endswith("sparse") else "full attention"
    shares, spread = {}, 0.0
    for (rows, length), attend in attended.items():
        tokens = rows * bench.block_length
        work = both(attend, layers.layer(bench, model, tokens, distinct=distinct_rows(bench, tokens)))
        rested, loaded = _timings(bench, captured(bench, {"pass": work})["pass"] if bench.on_cuda else work)
        shares[tokens] = min(1.0, rested.seconds / loaded.seconds)
        spread = max(spread, rested.spread, loaded.spread)
        for case, timing in (("with rests", rested), ("without rest", loaded)):
            part.rows.append(row_of(timing, case=case, attends=kind, requests=rows, prefix=length, rows=tokens))
    at = tuple(float(tokens) for tokens in sorted(shares))
    note = f"layers of {bench.shape.name}, {kind}: {BUSY_SHARE:.0%} busy over all the time, {LOAD_S} s"
    return Value(path, "share", tuple(shares[int(n)] for n in at), at, "rows", round(spread, 4), note)


def distinct_rows(bench: Bench, tokens: int) -> int:
    """Rows that differ: as many as route independently in runs, so that a pass reads as many experts as a step."""
    return max(1, round(bench.found.get("engine.routed_token_share", 1.0) * tokens))


def passes(bench: Bench, pool: attention.Pool, products: Work, rows: int, length: int) -> Work:
    """As many layers of attention as the model has, though the pool may hold fewer of this size, and all products."""
    return both(full_attention(bench, pool, rows, length), products)


def full_attention(bench: Bench, pool: attention.Pool, rows: int, length: int) -> Work:
    """Attention of all layers to the whole context."""
    attend = pool.work(rows, length)
    times = max(1, round(bench.shape.num_layers / pool.layers(rows, length)))

    def run() -> None:
        for _ in range(times):
            attend()

    return run


def selected_entries(bench: Bench, pool: attention.Pool, rows: int, context: int) -> Work:
    """Attention of the exact layers to the whole context, of the others to what is selected and a block."""
    exact = min(build(bench.shape, "ideal").settings.exact_layers, bench.shape.num_layers)
    selected = int(attention.SELECTED * context) + bench.block_length
    return both(pool.work(rows, context, most=exact), pool.work(rows, selected, most=bench.shape.num_layers - exact))


def both(first: Work, second: Work) -> Work:
    """One after the other."""

    def run() -> None:
        first()
        second()

    return run


def _timings(bench: Bench, work: Work) -> tuple[Timing, Timing]:
    """Passes with rests and, after them, without; of the latter the second half, when the clock has settled."""
    with torch.inference_mode(), bench.on_stream():
        once = median(_seconds(bench, work) for _ in range(max(3, bench.plan.warmup)))
        rest_s = once * (1 / BUSY_SHARE - 1)
        rested = _for(lambda: _seconds(bench, work), REST_S if bench.on_cuda else 0.02, rest_s)
        loaded = _for(lambda: _seconds(bench, work), LOAD_S if bench.on_cuda else 0.02, 0.0)
    return Timing("with rests", rested, bench.plan.warmup), Timing("without rest", loaded[len(loaded) // 2 :], 1)


def _for(sample: Callable[[], float], seconds: float, rest_s: float) -> tuple[float, ...]:
    """Samples of so many seconds, at least two."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 2:
        found.append(sample())
        if rest_s:
            time.sleep(rest_s)
    return tuple(found)


def _seconds(bench: Bench, work: Work) -> float:
    """One call by the host's clock, to its end: a pass lasts milliseconds."""
    begun = time.perf_counter()
    work()
    if bench.on_cuda:
        bench.stream.synchronize()
    return time.perf_counter() - begun
