"""The HERALD paper's tables and figures, recomputed on a profile, with the printed values beside ours.

Each function returns rows ``{..keys.., published, value, error, set}``; ``published`` and ``error`` are ``None`` where
the paper prints no number. ``set`` says whether the profile was fitted to the value (``fit``), a machine number was
solved from it (``derived``), or neither (``held-out``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from herald_pipeline import capacity, catalogue, methods, published
from herald_pipeline import pipeline as pipelines
from herald_pipeline.capacity import Memory
from herald_pipeline.hardware import Profile
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.workload import DEFAULT_GEN_TOKENS, Workload
from herald_sim import fast
from herald_sim.ceilings import ceilings
from herald_sim.exhibits.targets import FIT, HELD_OUT, Target, targets, throughput
from herald_sim.planning import Peak, find_peak
from herald_sim.simulate import simulate

Row = dict[str, Any]
MODEL = "llada2-mini"
CONTEXTS = tuple(published.CONTEXTS.values())
STEPS_SWEPT = (4, 8, 12, 16, 20, 24, 28, 32)
"""T of Fig. 14's axis as we sweep it; the paper prints T = 8 and 20 only."""


def row(keys: Row, value: float | None, printed: float | None, kind: str) -> Row:
    """One row of an exhibit."""
    error = None if printed is None or value is None else value / printed - 1
    return {**keys, "published": printed, "value": value, "error": error, "set": kind}


def _target_rows(profile: Profile, exhibit: str) -> list[Row]:
    return [
        row(_keys(target), target.predict(profile), target.published, target.set)
        for target in targets()
        if target.exhibit == exhibit
    ]


def _keys(target: Target) -> Row:
    keys: Row = {"name": target.key, "model": target.model, "context": target.context}
    keys.update({"method": target.method, "batch": target.batch} if target.method else {})
    return {**keys, "assumption": target.assumption} if target.assumption else keys


def peak_of(profile: Profile, model: str, method: str, context: int, budget: float | None = None) -> Peak:
    """Best feasible batch of a method; the search leaves contention out, the value at the best batch does not."""
    settings = {} if budget is None else {"budget": budget}
    pipeline = pipelines.build(catalogue.get(model), method, **settings)

    def search(batch: int) -> float:
        workload = Workload.uniform(context, batch, block_length=pipeline.settings.block_length)
        return fast.evaluate(pipeline, profile, workload).throughput_tok_s

    return find_peak(pipeline, context + DEFAULT_GEN_TOKENS, profile, Memory.of(profile), search)


def table_2(profile: Profile) -> list[Row]:
    """Peak throughput at the paper's batch; beside it our best feasible batch, the largest one and what limits it."""
    rows = []
    for found in _target_rows(profile, "Table II"):
        point = published.find(
            exhibit="Table II",
            metric="peak_throughput",
            model_name=found["model"],
            context_tokens=found["context"],
            method_name=found["method"],
        )[0]
        peak = peak_of(profile, found["model"], found["method"], found["context"], point.budget_share)
        ours = {"our_peak_batch": peak.batch, "our_largest_batch": peak.largest_batch, "limit": peak.limit}
        rows.append({**found, **ours, "batch_error": peak.largest_batch / found["batch"] - 1})
    return rows


def fig_5(profile: Profile) -> list[Row]:
    """The printed ceilings; ``binds`` names the schemes whose lowest one it is, selection kernels included."""
    printed = [target for target in targets() if target.exhibit == "Fig 5"]
    batch = next(target.batch for target in printed if target.batch is not None)
    found = ceilings(catalogue.get(MODEL), profile, CONTEXTS[-1], batch=batch)
    rows = []
    for target in printed:
        name = target.key.removeprefix("Fig 5 ")
        same = [ceiling for ceiling in found if ceiling["name"] == name]
        binds = "; ".join(ceiling["scheme"] for ceiling in same if ceiling["binding"])
        keys: Row = {"name": name, "resource": same[0]["resource"], "binds": binds}
        keys.update({"assumption": target.assumption} if target.assumption else {})
        rows.append(row(keys, float(same[0]["value_tok_s"]), target.published, target.set))
    return rows


def fig_4(profile: Profile) -> list[Row]:
    """Dense throughput by batch up to where memory ends, and the line beyond as if it did not."""
    context = CONTEXTS[-1]
    printed = published.number(exhibit="Fig 4", metric="throughput_at_HBM_OOM")
    pipeline = pipelines.build(catalogue.get(MODEL), "dense")
    largest = capacity.largest_batch(pipeline, context + DEFAULT_GEN_TOKENS, Memory.of(profile))
    rows = []
    for batch in sorted({1, 2, 4, 8, 12, largest, 24, 32, 48, 64, 80, 96, 128}):
        keys = {"context": context, "method": "dense", "batch": batch, "fits": batch <= largest}
        value = throughput(profile, MODEL, "dense", context, batch)
        rows.append(row(keys, value, printed if batch == largest else None, FIT if batch == largest else HELD_OUT))
    limit = _ceiling(profile, context, "gpu_full_kv_forward", None)
    target = next(t for t in targets() if t.key == "Fig 5 gpu_full_kv_forward")
    rows.append(
        row({"context": context, "method": "dense", "batch": None, "fits": False}, limit, target.published, FIT)
    )
    return rows


def fig_12(profile: Profile) -> list[Row]:
    """Throughput by batch: Dense, Dense projected, HERALD, the ideal and the per-step PCIe line."""
    context = CONTEXTS[-1]
    printed = {
        (t.method, t.batch): t.published
        for t in targets()
        if t.context == context and t.model == MODEL and t.exhibit in ("Table II", "Fig 12")
    }
    rows = []
    for method in ("dense", "herald"):
        pipeline = pipelines.build(catalogue.get(MODEL), method)
        largest = capacity.largest_batch(pipeline, context + DEFAULT_GEN_TOKENS, Memory.of(profile))
        known = [batch for name, batch in printed if name == method and batch is not None]
        for batch in sorted({1, 4, 8, 16, 32, 48, 64, 80, largest, *known}):
            if method == "herald" and batch > largest:
                continue
            series = method if batch <= largest else f"{method}, projected"
            value = throughput(profile, MODEL, method, context, batch)
            paper = printed.get((method, batch))
            rows.append(row({"series": series, "batch": batch}, value, paper, HELD_OUT if paper is None else FIT))
            if method == "herald":
                ideal = _ceiling(profile, context, "gpu_sparse_forward", batch)
                rows.append(row({"series": "ideal: sparse forwards alone", "batch": batch}, ideal, None, HELD_OUT))
    line = _ceiling(profile, context, "sparse_fetch_per_step", None)
    paper = published.number(exhibit="Fig 12", metric="pcie_fetch_ceiling")
    rows.append(row({"series": "PCIe line, sparse KV each step", "batch": None}, line, paper, "derived"))
    return rows


_ABLATION = ("mage-offload", "mage-cpu", "mage-cpu-representative", "herald")
_TWO_BY_TWO = {
    "mage-cpu": ("in line", "all queries"),
    "mage-cpu-representative": ("in line", "one query"),
    "herald-32q": ("beside, on a draft", "all queries"),
    "herald": ("beside, on a draft", "one query"),
}


def fig_13(profile: Profile) -> list[Row]:
    """The ablation, each bar at its own best feasible batch; beside it the full 2 x 2 of draft and representative."""
    rows = []
    for context in CONTEXTS:
        printed = {
            point.method_name: point.number
            for point in published.find(exhibit="Fig 13", metric="peak_throughput", context_tokens=context)
        }
        bars = {}
        for method in (*_ABLATION, "herald-32q"):
            budget = published.find(exhibit="Fig 13", metric="peak_throughput")[0].budget_share
            peak = peak_of(profile, MODEL, method, context, budget)
            bars[method] = throughput(profile, MODEL, method, context, peak.batch, budget=budget)
            selection, queries = _TWO_BY_TWO.get(method, ("on the GPU, in line", "all queries"))
            keys = {
                "context": context,
                "method": method,
                "batch": peak.batch,
                "selection": selection,
                "queries": queries,
            }
            paper = printed.get(method)
            kind = HELD_OUT if paper is None else FIT
            rows.append({**row(keys, bars[method], paper, kind), "normalised": bars[method] / bars["mage-offload"]})
    return rows


def fig_14(profile: Profile) -> list[Row]:
    """Throughput and stream latencies over T; the first T at which HERALD passes Dense stands in every row."""
    batches = published.find(exhibit="Fig 14", metric="batch")
    rows = []
    for context in CONTEXTS:
        size = {point.method_name: int(point.value) for point in batches if point.context_tokens == context}
        swept = []
        for steps in STEPS_SWEPT:
            dense, herald = (_result(profile, method, context, size[method], steps) for method in ("dense", "herald"))
            swept.append((steps, dense.throughput_tok_s or 0.0, herald))
        first = next((steps for steps, dense, herald in swept if (herald.throughput_tok_s or 0.0) > dense), None)
        for steps, dense, herald in swept:
            value = herald.throughput_tok_s or 0.0
            printed = next((t.published for t in targets() if t.key == f"Fig 14 T={steps} {context // 1024}K"), None)
            keys = {
                "context": context,
                "T": steps,
                "dense_tok_s": dense,
                "herald_tok_s": value,
                "main_latency_s": herald.main_time_s,
                "retrieval_latency_s": herald.retrieval_time_s,
                "first_T_above_dense": first,
            }
            rows.append(row(keys, value / dense, printed, HELD_OUT if printed is None else FIT))
    return rows


def budget_cost(profile: Profile) -> list[Row]:
    """What a budget 1.75 times as large costs the denoising phase, at the largest batch of each budget."""
    printed = published.number(exhibit="IV-A3", metric="throughput_loss_from_1.75x_budget")
    factor = published.find(exhibit="Fig 9", metric="budget_factor_matching_MAGE", method="HERALD")[0].number or 1.0
    large = methods.get("herald").defaults.budget
    rows = []
    for context in CONTEXTS:
        values, sizes = [], []
        for budget in (large / factor, large):
            pipeline = pipelines.build(catalogue.get(MODEL), "herald", budget=budget)
            size = capacity.largest_batch(pipeline, context + DEFAULT_GEN_TOKENS, Memory.of(profile))
            rate = ceilings(catalogue.get(MODEL), profile, context, budget=budget, batch=size)
            values.append(next(found["value_tok_s"] for found in rate if found["name"] == "gpu_sparse_forward"))
            sizes.append(size)
        loss = 100 * (1 - values[1] / values[0])
        keys = {"context": context, "budget": large, "factor": factor, "batches": sizes, "unit": "%"}
        rows.append(row(keys, loss, printed, HELD_OUT))
    return rows


def _result(profile: Profile, method: str, context: int, batch: int, steps: int) -> Any:
    pipeline: Pipeline = pipelines.build(catalogue.get(MODEL), method)
    workload = Workload.uniform(context, batch, block_length=pipeline.settings.block_length, steps=steps)
    return simulate(pipeline, profile, workload, beyond_memory=True)


def _ceiling(profile: Profile, context: int, name: str, batch: int | None) -> float:
    rows = ceilings(catalogue.get(MODEL), profile, context, batch=batch)
    return next(float(found["value_tok_s"]) for found in rows if found["name"] == name)


EXHIBITS: dict[str, Callable[[Profile], list[Row]]] = {
    "table-2": table_2,
    "fig-4": fig_4,
    "fig-5": fig_5,
    "fig-8": partial(_target_rows, exhibit="Fig 8"),
    "fig-12": fig_12,
    "fig-13": fig_13,
    "fig-14": fig_14,
    "budget-cost": budget_cost,
}
"""Exhibits by name."""
