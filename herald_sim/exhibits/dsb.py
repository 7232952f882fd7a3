"""The DSB article's tables, taken apart into forwards and step times; and its worked example, recomputed.

The tables print tokens per second, no number of forwards and no step time, so nothing here is a prediction: every row
is *derived*. If TPS = 256 / (full forwards x full time + other forwards x short time), rows that share a model and a
task must agree on the two times. That agreement is what can be checked, and where it fails the row says so.

    top1, no cache       256 forwards, all full                       -> full time (GSM8K: 66.9 ms)
    no cache             all forwards full                            -> number of forwards
    with a cache         one full forward per 32 tokens, others short -> short time, forwards as without the cache
    plain Dual under DSB short time from Dual under fixed blocks      -> number of forwards: staleness costs steps
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from typing import Any

import numpy as np

from herald_pipeline import published
from herald_pipeline.decoding import schedulers
from herald_pipeline.published import Paper, Point

DERIVED = "derived"
Key = tuple[str, str, str]
"""Decoder, scheduler and cache in the article's words."""

VANILLA: Key = ("Top-1", "Naive", "None")
NAIVE: Key = ("Confidence", "Naive", "None")
NAIVE_DUAL: Key = ("Confidence", "Naive", "Dual")
_STEP_MODEL, _STEP_TASK = "LLaDA-8B-Instruct", "GSM8K"
"""The only model and task with the three rows that give both times."""
_SAME_ARCHITECTURE = {"LLaDA-1.5": "LLaDA-8B-Instruct"}


@dataclass(frozen=True, slots=True)
class Row:
    """One printed throughput, taken apart.

    ``value`` is the throughput put together again from times of *other* rows (None where the row itself was used to get
    them), ``error`` its relative deviation. ``forwards`` is the implied NFE; ``basis`` says what it was derived from.
    """

    exhibit: str
    model: str
    task: str
    decoder: str
    scheduler: str
    cache: str
    published: float
    full_forward_ms: float | None = None
    short_step_ms: float | None = None
    forwards: float | None = None
    value: float | None = None
    error: float | None = None
    basis: str = ""
    note: str = ""
    set: str = DERIVED

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def _answer_tokens() -> float:
    return published.number(Paper.DSB, metric="generation_length", unit="tokens", exhibit="setup")


def _refreshes() -> float:
    """Full forwards of a cached run: one for each S_init committed tokens."""
    return _answer_tokens() / published.number(Paper.DSB, metric="global_refresh_period")


@cache
def _printed(model: str, task: str) -> Mapping[Key, float]:
    """Throughput by decoder, scheduler and cache; rows printed twice (Table 3) agree."""
    found = published.find(Paper.DSB, metric="throughput", model=model, task=task)
    return {(p.decoder, p.scheduler, p.cache): p.number for p in found if p.number is not None}


def seconds(throughput_tok_s: float) -> float:
    """Wall time of one answer of the article's length."""
    return _answer_tokens() / throughput_tok_s


@cache
def short_step_s() -> float:
    """Time of a short step of LLaDA-8B: GSM8K under fixed blocks, Dual against no cache, same number of forwards."""
    rows = _printed(_STEP_MODEL, _STEP_TASK)
    full = seconds(rows[VANILLA]) / _answer_tokens()
    forwards = seconds(rows[NAIVE]) / full
    return (seconds(rows[NAIVE_DUAL]) - _refreshes() * full) / (forwards - _refreshes())


def solve_full_forward_s(no_cache_s: float, dual_s: float, short_s: float, refreshes: float) -> float | None:
    """Full forward f with N f = ``no_cache_s`` and r f + (N - r) short = ``dual_s``; None without a real solution.

    The larger root has about r forwards in all and nothing to cache; the smaller one is meant.
    """
    # r f^2 - (dual + r short) f + no_cache short = 0
    linear = dual_s + refreshes * short_s
    discriminant = linear**2 - 4 * refreshes * no_cache_s * short_s
    return None if discriminant < 0 else (linear - sqrt(discriminant)) / (2 * refreshes)


@cache
def full_forward_s(model: str, task: str) -> tuple[float | None, str]:
    """Time of a full forward and what it was derived from."""
    rows = _printed(model, task)
    if VANILLA in rows:
        return seconds(rows[VANILLA]) / _answer_tokens(), "Top-1 row: one forward a token"
    if model in _SAME_ARCHITECTURE:
        twin = _SAME_ARCHITECTURE[model]
        return full_forward_s(twin, task)[0], f"{twin}: same architecture, same prompts"
    if NAIVE in rows and NAIVE_DUAL in rows and model == _STEP_MODEL:
        full = solve_full_forward_s(seconds(rows[NAIVE]), seconds(rows[NAIVE_DUAL]), short_step_s(), _refreshes())
        return full, "fixed blocks with and without Dual, short step of GSM8K"
    return None, "no row gives it"


def _take_apart(point: Point) -> Row:
    tps = point.number
    assert tps is not None
    row = Row(point.exhibit, point.model, point.task, point.decoder, point.scheduler, point.cache, tps)
    full, basis = full_forward_s(point.model, point.task)
    if full is None:
        return replace(row, basis=basis, note="not separable: two unknowns, one equation")
    row = replace(row, full_forward_ms=1e3 * full, basis=basis)
    if point.cache == "None":
        return _without_cache(row, full)
    return _with_cache(row, full)


def _without_cache(row: Row, full: float) -> Row:
    forwards = seconds(row.published) / full
    note = "input" if row.decoder == VANILLA[0] else ""
    if forwards > _answer_tokens() + 0.5:
        note = (
            f"inconsistent: {forwards:.0f} forwards for {_answer_tokens():.0f} tokens; TPS probably counts tokens "
            "before the end of text only"
        )
    return replace(row, forwards=forwards, note=note)


def _with_cache(row: Row, full: float) -> Row:
    rows = _printed(row.model, row.task)
    same_schedule = (row.decoder, row.scheduler, "None")
    refreshes, total = _refreshes(), seconds(row.published)
    stale = row.cache == "Dual" and row.scheduler != "Naive"
    if same_schedule not in rows or stale:
        # Without the same schedule's forwards, or where a stale cache changes them, the short step is taken as known.
        short = short_step_s()
        if not row.model.startswith("LLaDA"):
            return replace(row, note="not separable: no short step is known for this architecture")
        forwards = refreshes + (total - refreshes * full) / short
        note = "stale KV lowers confidence and adds forwards" if stale else "forwards at the short step of GSM8K"
        return replace(row, short_step_ms=1e3 * short, forwards=forwards, note=note)
    forwards = seconds(rows[same_schedule]) / full
    short = (total - refreshes * full) / (forwards - refreshes)
    row = replace(row, short_step_ms=1e3 * short, forwards=forwards)
    if (row.decoder, row.scheduler, row.cache) == NAIVE_DUAL and row.model == _STEP_MODEL:
        return replace(row, note="input")
    value = _answer_tokens() / (refreshes * full + (forwards - refreshes) * short_step_s())
    return replace(row, value=value, error=value / row.published - 1, note="check: short step of GSM8K Dual Naive")


def _rows(exhibit: str) -> list[dict[str, Any]]:
    return [_take_apart(point).to_dict() for point in published.find(Paper.DSB, metric="throughput", exhibit=exhibit)]


def main_table() -> list[dict[str, Any]]:
    """Throughputs of the main comparison, taken apart."""
    return _rows("main")


def table_3() -> list[dict[str, Any]]:
    """Throughputs of Table 3 (one schedule, Dual against DSB Cache), taken apart."""
    return _rows("Table 3")


def _walk(prompt: int, response: int, s_init: int, s_max: int, commits: list[list[int]]) -> list[tuple[int, int]]:
    """[s, e) after each round's commits (absolute positions), by the product's scheduler."""
    scheduler = schedulers.get("dsb-greedy", s_init=s_init, s_max=s_max)
    masked = np.zeros((1, prompt + response), dtype=bool)
    masked[:, prompt:] = True
    state = scheduler.start(np.asarray([prompt]), np.asarray([response]))
    edges = []
    for positions in commits:
        accepted = np.zeros_like(masked)
        accepted[0, positions] = True
        state = scheduler.advance(state, masked, accepted)
        masked = masked & ~accepted
        edges.append((int(state.s[0]), int(state.e[0])))
    return edges


def worked_example() -> list[dict[str, Any]]:
    """Edges of the worked example in absolute positions; the printed 30 uses U before the last commit."""
    setting = {
        name: int(published.number(Paper.DSB, exhibit="worked example", metric=name))
        for name in ("prompt_length", "response_length", "S_init", "S_max")
    }
    prompt = setting["prompt_length"]
    # Relative positions of the article, from one: 1 2 4, then 5 6 7, then 3.
    commits = [[prompt + i - 1 for i in group] for group in ([1, 2, 4], [5, 6, 7], [3])]
    edges = _walk(prompt, setting["response_length"], setting["S_init"], setting["S_max"], commits)
    names = ["round1_s_abs", "round1_e_abs", "round2_s_abs", "round2_e_abs", "round3_s_abs", "round3_e_abs_printed"]
    rows = []
    for name, value in zip(names, (edge for pair in edges for edge in pair), strict=True):
        point = published.find(Paper.DSB, exhibit="worked example", metric=name)[0]
        printed = published.number(Paper.DSB, exhibit="worked example", metric=name)
        rows.append(
            {
                "exhibit": point.exhibit,
                "quantity": name.removesuffix("_printed").removesuffix("_abs"),
                "published": printed,
                "value": float(value),
                "error": value / printed - 1,
                "note": point.note if value != printed else "",
                "set": DERIVED,
            }
        )
    return rows


EXHIBITS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "dsb-main": main_table,
    "dsb-table-3": table_3,
    "dsb-example": worked_example,
}
"""Exhibits of the DSB article by the name that ``herald-sim exhibit`` takes."""
