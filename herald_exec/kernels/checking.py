"""``herald-exec kernels --check``: every usable tier against the float64 definition.

The same cases are the test suite's; here they run on the user's machine, where tiers exist that a developer's lacks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import reference
from .comparison import BF16_P, BF16_PV, FP32_P, Comparison, Tolerance, compare
from .dispatch import active_tier, set_tier, usable_tiers
from .elements import from_float32, storage_dtype
from .int8_keys import Int8Keys
from .options import Draft, SelectOptions
from .selection import gather, kernel_kind, select, topk
from .store import FlatKV, PagedKV
from .tuning import Tuning

#: Each way that changes which code runs.
TUNINGS = (
    Tuning(),
    Tuning(distance=1),
    Tuning(distance=4, streams=4, turned=True),
    Tuning(distance=2, streams=2, tiles=True),
    Tuning(turned=True, tiles=True, rows_ahead=0),
    Tuning(bulk=True),
    Tuning(bulk=True, tiles=True, rows_ahead=3),
    Tuning(distance=4, streams=4, even=True),
    Tuning(distance=2, tiles=True, even=True),
    Tuning(distance=9, even=True),
    Tuning(distance=12, streams=4, tiles=True, even=True),
)
EDGE_SIZES = (1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 129, 255, 257)


@dataclass(frozen=True)
class Case:
    """One selection to compare: shapes, seed and options."""

    lengths: tuple[int, ...]
    budget: tuple[int, ...]
    heads: int = 2
    group: int = 4
    x: int = 1
    head_dim: int = 128
    dtype: str = "bf16"
    draft: tuple[int, ...] | None = None
    own_key: bool = False
    flat: bool = False
    keys8: bool = False
    score_scale: float = 1.0
    poison: str = ""
    options: SelectOptions = field(default_factory=SelectOptions)
    threads: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        parts = [
            f"S={list(self.lengths)} k={list(self.budget)} d={self.head_dim} G={self.group} x={self.x}",
            self.dtype,
        ]
        parts += [name for name in ("own_key", "flat", "keys8", "poison") if getattr(self, name)]
        if self.draft:
            parts.append(f"draft={list(self.draft)}")
        return " ".join([*parts, str(self.options)])


def _rows(rng: np.random.Generator, case: Case, tokens: int, scale: float) -> np.ndarray[Any, Any]:
    return from_float32(rng.standard_normal((tokens, case.heads, case.head_dim)) * scale, case.dtype)


def _poisoned(values: np.ndarray[Any, Any], how: str, dtype: str) -> np.ndarray[Any, Any]:
    """One row of the first head replaced by what must not break the others."""
    if how and len(values):
        constant = {"nan": np.nan, "inf": np.inf, "huge": 3e4, "denormal": 1e-40}[how]
        values[len(values) // 2, 0] = from_float32(np.full(values.shape[2], constant), dtype)
    return values


def _store(case: Case, rng: np.random.Generator) -> PagedKV | FlatKV:
    rows, capacity = len(case.lengths), max(1, *case.lengths)
    if case.flat:
        shape = (rows, case.heads, capacity, case.head_dim)
        k, v = (from_float32(rng.standard_normal(shape), case.dtype) for _ in range(2))
        return FlatKV(k, v, case.dtype)
    pool = PagedKV(2, rows + 1, case.heads, capacity, case.head_dim, case.dtype)
    pool.pages[:] = from_float32(np.full(1, np.nan), case.dtype)[0]  # whatever is behind a length must not matter
    for row, length in enumerate(case.lengths):
        k = _poisoned(_rows(rng, case, length, case.score_scale), case.poison, case.dtype)
        v = _rows(rng, case, length, 1.0)
        cut = length // 3
        pool.append(1, row, 0, k[:cut], v[:cut])
        pool.append(1, row, cut, k[cut:], v[cut:])
    return pool


def _kind_of(case: Case) -> str:
    """The kernel that scans; on ``amx`` queries and P are rounded to bf16, which the paper's kernel never does."""
    pv = "f32" if case.options.paper_like else case.options.pv
    return "few" if case.keys8 else kernel_kind(case.x, case.group, case.dtype, case.head_dim, pv)


def tolerance_of(case: Case) -> Tolerance:
    """What the active tier owes for this case."""
    kind = _kind_of(case)
    if kind == "amx":
        return BF16_P
    dots = active_tier() in ("avx512bf16", "amx") and case.dtype == "bf16" and case.options.pv != "f32"
    summed = bool(case.draft) if case.keys8 else kind == "few"  # with 8-bit keys a scan makes no output, drafts do
    exact = BF16_PV if dots and summed else FP32_P
    # an fp32 score of 200 is known to 1e-5 only, and the exponential turns that into a relative error
    return replace(exact, importance=exact.importance * max(1.0, case.score_scale / 10))


def run_case(case: Case) -> Comparison:
    """Run one case on the active tier and compare it; a gather of what was selected is checked too."""
    rng = np.random.default_rng(case.seed)
    store = _store(case, rng)
    rows, layer = len(case.lengths), 0 if case.flat else 1
    queries = rng.standard_normal((rows, case.x, case.heads * case.group, case.head_dim)).astype(np.float32)
    draft = own = None
    if case.draft:
        pool = PagedKV(1, rows, case.heads, max(1, *case.draft), case.head_dim, case.dtype)
        for row, length in enumerate(case.draft):
            pool.append(0, row, 0, _rows(rng, case, length, 1.0), _rows(rng, case, length, 1.0))
        draft = Draft(pool, np.arange(rows), np.array(case.draft), 0)
    if case.own_key:
        shape = (rows, case.x, case.heads, case.head_dim)
        own = (rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32))
    slots, lengths, budget = np.arange(rows), np.array(case.lengths), np.array(case.budget)
    options = replace(case.options, keep_importance=True)
    keys8 = None
    if case.keys8 and isinstance(store, PagedKV):
        keys8 = Int8Keys(store)
        for row, length in enumerate(case.lengths):
            keys8.update(layer, row, 0, length // 2)
            keys8.update(layer, row, length // 2, length)
    found = select(
        store,
        layer,
        slots,
        lengths,
        queries,
        budget,
        draft=draft,
        extra_kv=own,
        keys8=keys8,
        options=options,
        threads=case.threads,
    )
    expected = reference.select(
        store,
        layer,
        slots,
        lengths,
        queries,
        budget,
        draft=draft,
        extra_kv=own,
        keys8=keys8,
        options=options,
        bf16_queries=_kind_of(case) == "amx",
        output_of=found if options.key_only or case.keys8 else None,
    )
    result = compare(found, expected, lengths, tolerance_of(case))
    shape = (*found.indices.shape, case.head_dim)
    out_k, out_v = (np.full(shape, 7, storage_dtype(case.dtype)) for _ in range(2))
    gather(store, layer, slots, found, out_k, out_v, threads=case.threads)
    problems = list(result.problems)
    for row, head in np.ndindex(found.counts.shape):
        k, v = store.read(layer, row, 0, int(lengths[row]))
        count = found.counts[row, head]
        chosen = found.indices[row, head, :count]
        for name, out, whole in (("K", out_k, k), ("V", out_v, v)):
            if out[row, head, :count].tobytes() != whole[chosen, head].tobytes() or out[row, head, count:].any():
                problems.append(f"row {row} head {head}: gathered {name} differs")
    return replace(result, problems=problems)


def cases() -> Iterator[Case]:
    """Shapes around every edge, dtypes, groups, drafts, own keys, options, poisoned rows."""
    yield Case(EDGE_SIZES, tuple(max(1, size // 4) for size in EDGE_SIZES))
    yield Case(EDGE_SIZES, tuple(max(1, size // 4) for size in EDGE_SIZES), x=4)
    yield Case((0, 1, 5, 249), (2048,) * 4)
    yield Case((0, 1, 5, 249), (0,) * 4, draft=(0, 1, 2, 40), own_key=True)
    for head_dim in (8, 16, 24, 40, 64, 72, 96, 128, 256):
        yield Case((0, 1, 65, 200), (5, 1, 7, 20), head_dim=head_dim, draft=(0, 3, 33, 65), own_key=True)
        yield Case((0, 1, 65, 200), (5, 1, 7, 20), head_dim=head_dim, x=5, draft=(0, 3, 33, 65), own_key=True)
    for dtype in ("fp16", "fp32"):
        yield Case((1, 65, 200), (1, 7, 20), dtype=dtype, head_dim=64, draft=(3, 33, 65))
        yield Case((1, 65, 200), (1, 7, 20), dtype=dtype, head_dim=72, x=4)
    for group in (1, 2, 3, 5, 7, 20, 24):
        yield Case((97, 300), (9, 30), group=group)
    for x in (2, 8, 16, 32):
        yield Case((97, 700), (9, 70), x=x)
    for group, x in ((1, 7), (3, 2), (1, 8), (5, 2), (7, 2), (15, 1)):  # about AMX's border of 8 rows, and of 16
        yield Case((97, 700), (9, 70), group=group, x=x)
    borders = (191, 193, 319, 321, 447, 449, 705)  # of AMX's blocks, which grow where a head begins
    for x in (2, 8):
        yield Case(borders, tuple(size // 10 for size in borders), x=x)
        yield Case((333, 2100), (20, 100), x=x, options=SelectOptions(key_only=True), draft=(30, 0))
    for length in (4097, 9001, 20000):
        yield Case((length, length // 2), (length // 20, length // 40))
        yield Case((length,), (length // 20,), x=4)
    for score_scale in (3.0, 30.0):
        yield Case((3000,), (150,), score_scale=score_scale)
        for x in (2, 4):
            yield Case((3000,), (150,), score_scale=score_scale, x=x)
    for pv in ("f32", "bf16"):
        yield Case((333, 64), (20, 9), options=SelectOptions(pv=pv))
        yield Case((333, 64), (20, 9), x=4, options=SelectOptions(pv=pv))
    for x in (1, 4):
        yield Case((333, 2100), (20, 100), x=x, options=SelectOptions(key_only=True), draft=(30, 0))
        yield Case((333, 2100), (20, 100), x=x, options=SelectOptions(smoothing=5), own_key=True)
        yield Case((333, 2100), (20, 100), x=x, options=SelectOptions(paper_like=True))
        yield Case((333, 2100), (20, 100), x=x, flat=True)
        for poison in ("nan", "inf", "huge", "denormal"):
            yield Case((100, 700), (9, 50), x=x, poison=poison)
    for x in (1, 5):
        for head_dim in (8, 40, 128, 256):
            yield Case((0, 1, 65, 700), (5, 1, 7, 60), x=x, head_dim=head_dim, keys8=True)
        yield Case((333, 2100), (20, 100), x=x, keys8=True, draft=(30, 0), own_key=True)
        yield Case((333, 5000), (20, 250), x=x, keys8=True, options=SelectOptions(rescore_all=True))
        yield Case((100, 700), (9, 50), x=x, keys8=True, poison="nan")
        yield Case((100, 700), (9, 50), x=x, keys8=True, poison="inf")
    yield Case((300,), (400,), keys8=True, dtype="fp16", head_dim=64)
    yield Case((300,), (30,), keys8=True, dtype="fp32", group=7, options=SelectOptions(candidates=1.0))
    for tuning in TUNINGS:
        yield Case((777, 64), (50, 9), options=SelectOptions(tuning=tuning))
        yield Case((777, 64), (50, 9), group=3, x=3, options=SelectOptions(tuning=tuning))
        yield Case((777, 64), (50, 9), x=4, options=SelectOptions(tuning=tuning))
        yield Case((777, 64), (50, 9), keys8=True, options=SelectOptions(tuning=tuning))
        yield Case((777, 64), (50, 9), options=SelectOptions(tuning=tuning, key_only=True))


def adversarial_rows(length: int = 20_000) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Importance rows that break careless top-k: ties, order, infinities, NaN, extremes."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(length)
    yield "random", normal
    yield "all equal", np.full(length, 0.25)
    yield "heavy ties", rng.integers(0, 50, length).astype(float)
    yield "ascending", np.arange(length, dtype=float)
    yield "descending", -np.arange(length, dtype=float)
    yield "mostly -inf", np.where(rng.random(length) < 0.99, -np.inf, normal)
    yield "some +inf", np.where(rng.random(length) < 0.01, np.inf, normal)
    yield "NaN each seventh", np.where(np.arange(length) % 7 == 0, np.nan, normal)
    yield "all NaN", np.full(length, np.nan)
    yield "huge", normal * 5e37
    yield "denormal", normal * 1e-41
    yield "both zeros", np.where(rng.random(length) < 0.5, -0.0, 0.0)
    yield "few large among zeros", np.where(np.arange(length) % 1000 == 3, normal, 0.0)
    yield "largest where samples miss", np.where(np.arange(length) % (length // 1024) == 0, 0.0, np.abs(normal))


def check_topk() -> list[str]:
    """Exact index sets on the adversarial rows, for short and long rows; problems found."""
    problems = []
    for length in (1, 2, 17, 1000, 8192, 8193, 20_000):
        for name, row in adversarial_rows(max(length, 1024)):
            values = row[:length].astype(np.float32)
            for k in sorted({0, 1, length // 20, length - 1, length, length + 5}):
                expected = reference.topk(values, k)
                problems += [
                    f"top-k{' heap' * heap} of {name!r}, length {length}, k {k} differs from the definition"
                    for heap in (False, True)
                    if not np.array_equal(topk(values, k, heap=heap), expected)
                ]
    return problems


def check_tiers(tiers: list[str] | None = None) -> list[dict[str, Any]]:
    """Run everything on each tier; one row a tier with the largest errors and every problem. The tier is put back."""
    before = active_tier()
    rows = []
    try:
        for tier in tiers or usable_tiers():
            set_tier(tier)
            problems = check_topk()
            worst: dict[str, float] = {}
            swaps = count = 0
            for case in cases():
                result = run_case(case)
                count += 1
                swaps += result.swaps
                kind = _kind_of(case)
                for name, error in (("output", result.output_error), ("importance", result.importance_error)):
                    worst[f"{name}_{kind}"] = max(worst.get(f"{name}_{kind}", 0.0), error)
                problems += [f"{case}: {each}" for each in result.problems]
            rows.append({"tier": tier, "cases": count, "swaps": swaps, "worst_error": worst, "problems": problems})
    finally:
        set_tier(before)
    return rows
