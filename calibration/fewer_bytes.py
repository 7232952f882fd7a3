"""Selection that reads less than all of the KV: by keys alone, and over 8-bit keys.

Both have kernels of their own, so the share of the DRAM rate that the full scan reaches does not hold for them. Bytes
and FLOPs are those that the description counts, so the cost model gives the measured seconds back.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product

import numpy as np

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.timing import Timing
from herald_exec import kernels
from herald_pipeline.settings import Settings
from herald_pipeline.stages import LaunchShape
from herald_pipeline.units import GB
from herald_pipeline.work import Forward

KEYS = {"key-only": "engine.select_keys_dram_efficiency", "int8": "engine.select_int8_dram_efficiency"}
"""``settings.keys`` -> what is found for it."""
SELECTED = 20
"""One of so many entries is selected: the budget of 5%."""
INT8_LAYERS = 3
"""Layers of which 8-bit keys are made."""
Place = tuple[int, int]
"""Requests, and entries of each."""


def measure(
    bench: Bench,
    part: Part,
    pool: kernels.PagedKV,
    layers: Sequence[int],
    places: Sequence[Place],
    per_flop: Callable[[], float],
    dram: float,
) -> Callable[[], None]:
    """Time both kinds over ``places`` with one query a request; call the result to add them to ``part``.

    Calls go round ``layers`` of the pool; with 8-bit keys round :data:`INT8_LAYERS` of them at most, for a copy takes
    time and memory. ``per_flop`` (seconds) is asked for then: it follows from selections over the full KV. ``dram`` in
    bytes a second.
    """
    few = layers[:: -(-len(layers) // INT8_LAYERS)]
    slots = max(rows for rows, _ in places)
    with_8_bits = kernels.Int8Keys(pool)
    try:
        for layer, slot in product(few, range(slots)):
            with_8_bits.update(layer, slot, 0, pool.capacity_tokens, bench.retrieval_threads)
        cases = {
            f"{keys} {rows}x{context}": _case(bench, pool, few, rows, context, with_8_bits)
            if keys == "int8"
            else _case(bench, pool, layers, rows, context, None)
            for keys in KEYS
            for rows, context in places
        }
        timings = bench.time_host(cases)
    finally:
        with_8_bits.close()

    def add() -> None:
        for keys, path in KEYS.items():
            _add(bench, part, keys, path, places, timings, per_flop(), dram)

    return add


def _case(
    bench: Bench,
    pool: kernels.PagedKV,
    layers: Sequence[int],
    rows: int,
    context: int,
    keys8: kernels.Int8Keys | None,
) -> Callable[[], object]:
    shape = bench.shape
    q = np.random.default_rng(0).standard_normal((rows, 1, shape.num_heads, shape.head_dim), dtype=np.float32)
    slots, lengths, budget = np.arange(rows), np.full(rows, context), np.full(rows, max(1, context // SELECTED))
    options = kernels.SelectOptions(key_only=keys8 is None)
    threads, turn = bench.retrieval_threads, cycle(layers)

    def call() -> object:
        layer = next(turn)
        return kernels.select(pool, layer, slots, lengths, q, budget, keys8=keys8, options=options, threads=threads)

    return call


def _add(
    bench: Bench,
    part: Part,
    keys: str,
    path: str,
    places: Sequence[Place],
    timings: Mapping[str, Timing],
    per_flop: float,
    dram: float,
) -> None:
    forward = Forward(bench.shape, Settings(keys=keys, kv_dtype=bench.kv_dtype, dram_kv_dtype=bench.dram_kv_dtype))
    found = {}
    for rows, context in places:
        selected = rows * max(1, context // SELECTED)
        op = forward.select(LaunchShape(rows, rows, 0, rows * context, selected, 0, 0, 0), 1, draft=False)
        timing = timings[f"{keys} {rows}x{context}"]
        # What the model takes for the FLOPs comes on top. No scan is faster than memory.
        rest = max(timing.seconds - op.cpu_flops * per_flop, op.dram_bytes / dram)
        found[op.dram_bytes] = op.dram_bytes / rest / dram
        columns = {"rows": rows, "context": context, "queries": 1}
        gb_s = round(op.dram_bytes / timing.seconds / GB, 3)
        part.rows.append(row_of(timing, case=keys, **columns, bytes=op.dram_bytes, gb_s=gb_s))
    at = tuple(sorted(found))
    note = f"{bench.retrieval_threads} thread(s), tier {kernels.active_tier()}, KV in {bench.dram_kv_dtype}"
    spread = widest(timings[f"{keys} {rows}x{context}"] for rows, context in places)
    part.values.append(Value(path, "share", tuple(found[size] for size in at), at, "B", spread, note))
