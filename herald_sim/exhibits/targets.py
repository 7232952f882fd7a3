"""Published values that the simulator answers: each with the run that it stands for, and in which set it is.

``fit``: the profile's fitted numbers were chosen with it; ``derived``: a machine number was solved from it, so that
agreement is arithmetic; ``held-out``: neither. Values and settings are read from ``herald_pipeline.published``; what a
source leaves open (a batch, a reading of a sentence) is decided here and said in ``assumption``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from herald_pipeline import catalogue, methods, published
from herald_pipeline import pipeline as pipelines
from herald_pipeline.hardware import Profile
from herald_pipeline.published import Point
from herald_pipeline.workload import Workload
from herald_sim.ceilings import ceilings
from herald_sim.simulate import simulate

HARDWARE = "h100-sxm-80g_xeon-8481c"
"""The HERALD paper's machine."""
FIT, DERIVED, HELD_OUT = "fit", "derived", "held-out"
_PRINTED, _ASSUMED = 0.03, 0.05


@dataclass(frozen=True)
class Target:
    """One published value and how it is predicted from a profile."""

    key: str
    exhibit: str
    published: float
    predict: Callable[[Profile], float]
    set: str = FIT
    model: str = "llada2-mini"
    context: int | None = None
    method: str = ""
    batch: int | None = None
    assumption: str = ""

    @property
    def spread(self) -> float:
        """Relative error that a fit expects of it: larger where a batch or a reading had to be assumed."""
        return _ASSUMED if self.assumption else _PRINTED


def throughput(
    profile: Profile,
    model: str,
    method: str,
    context: int,
    batch: int,
    *,
    budget: float | None = None,
    steps: int = 20,
) -> float:
    """Decode throughput in tokens per second, memory limits left out.

    Answers have the default length, so that `herald-sim run` prints the same number for the same point.
    """
    settings = {} if budget is None else {"budget": budget}
    pipeline = pipelines.build(catalogue.get(model), method, **settings)
    workload = Workload.uniform(context, batch, block_length=pipeline.settings.block_length, steps=steps)
    found = simulate(pipeline, profile, workload, beyond_memory=True).throughput_tok_s
    assert found is not None
    return found


@cache
def targets() -> tuple[Target, ...]:
    """All of them, in the order of the exhibits."""
    return (*_table_2(), *_fig_5(), *_fig_8(), *_fig_12(), *_fig_13(), *_fig_14())


def _table_2() -> Iterable[Target]:
    for point in published.find(exhibit="Table II", metric="peak_throughput"):
        if point.method_name in methods.names():
            yield _run(point, int(point.batch))


def _run(point: Point, batch: int, assumption: str = "") -> Target:
    model, method, context = _named(point.model_name), _named(point.method_name), _known(point.context_tokens)
    budget = point.budget_share
    steps = _known(point.steps)

    def predict(profile: Profile) -> float:
        return throughput(profile, model, method, context, batch, budget=budget, steps=steps)

    key = f"{point.exhibit} {model} {point.context} {method}"
    value = _number(point)
    return Target(key, point.exhibit, value, predict, FIT, model, context, method, batch, assumption)


_CEILINGS = {
    "full-KV fetch per step": ("full_kv_fetch_per_step", DERIVED),
    "sparse fetch per step": ("sparse_fetch_per_step", DERIVED),
    "sparse fetch per block": ("sparse_fetch_per_block", DERIVED),
    "B-query selection on CPU": ("cpu_32q_attention", DERIVED),
    "Dense (unlimited HBM)": ("gpu_full_kv_forward", FIT),
    "sparse forward on GPU": ("gpu_sparse_forward", FIT),
}


def _fig_5() -> Iterable[Target]:
    for point in (*published.find(exhibit="Fig 4 / Fig 5"), *published.find(exhibit="Fig 5")):
        if point.method not in _CEILINGS or point.number is None:
            continue
        name, kind = _CEILINGS[point.method]
        context, steps = _known(point.context_tokens), _known(point.steps)
        batch = _peak_batch("herald", context)
        assumption = ""
        if name == "gpu_sparse_forward":
            assumption = f"batch {batch}, HERALD's in Table II: the paper prints none"
        elif name == "gpu_full_kv_forward":
            assumption = "batch without end: the paper prints none"
        yield Target(
            f"Fig 5 {name}",
            "Fig 5",
            _number(point),
            _ceiling(name, context, steps, batch),
            kind,
            context=context,
            batch=batch if name == "gpu_sparse_forward" else None,
            assumption=assumption,
        )


def _ceiling(name: str, context: int, steps: int, batch: int) -> Callable[[Profile], float]:
    def predict(profile: Profile) -> float:
        rows = ceilings(catalogue.get("llada2-mini"), profile, context, steps=steps, batch=batch)
        return next(float(row["value_tok_s"]) for row in rows if row["name"] == name)

    return predict


def _fig_8() -> Iterable[Target]:
    point = published.find(exhibit="Fig 8", metric="kernel_throughput_gain_32q_to_1q")[0]
    context = _known(point.context_tokens)

    def predict(profile: Profile) -> float:
        rows = ceilings(catalogue.get("llada2-mini"), profile, context)
        values = {row["name"]: float(row["value_tok_s"]) for row in rows}
        return values["cpu_1q_kernel"] / values["cpu_32q_kernel"]

    yield Target("Fig 8 gain of one query", "Fig 8", _number(point), predict, context=context)


def _fig_12() -> Iterable[Target]:
    point = published.find(exhibit="Fig 12", metric="projected_throughput")[0]
    context = _known(point.context_tokens)
    batch = _peak_batch("herald", context)
    steps = _known(point.steps)

    def predict(profile: Profile) -> float:
        return throughput(profile, "llada2-mini", "dense", context, batch, steps=steps)

    assumption = f"batch {batch}, HERALD's: the paper prints none"
    yield Target(
        "Fig 12 projected dense",
        "Fig 12",
        _number(point),
        predict,
        context=context,
        method="dense",
        batch=batch,
        assumption=assumption,
    )


def _fig_13() -> Iterable[Target]:
    for point in published.find(exhibit="Fig 13", metric="peak_throughput"):
        method, context = _named(point.method_name), _known(point.context_tokens)
        if method == "herald":
            continue  # Table II prints the same values
        of = method if method == "mage-offload" else "herald"
        batch = _peak_batch(of, context)
        yield _run(point, batch, f"batch {batch}, that of {of} in Table II: the figure prints none")


def _fig_14() -> Iterable[Target]:
    """``matches Dense`` at T = 8, read as a ratio of 1, in each context."""
    point = published.find(exhibit="Fig 14", metric="throughput_vs_Dense")[0]
    steps = _known(point.steps)
    batches = published.find(exhibit="Fig 14", metric="batch")
    for context in dict.fromkeys(_known(batch.context_tokens) for batch in batches):
        size = {_named(b.method_name): int(b.value) for b in batches if b.context_tokens == context}
        yield Target(
            f"Fig 14 T={steps} {context // 1024}K",
            "Fig 14",
            1.0,
            _ratio(context, size, steps),
            context=context,
            method="herald",
            batch=size["herald"],
            assumption="the text's 'matches' read as a ratio of 1",
        )


def _ratio(context: int, size: dict[str, int], steps: int) -> Callable[[Profile], float]:
    def predict(profile: Profile) -> float:
        herald, dense = (
            throughput(profile, "llada2-mini", method, context, size[method], steps=steps)
            for method in ("herald", "dense")
        )
        return herald / dense

    return predict


def _peak_batch(method: str, context: int) -> int:
    found = [
        point
        for point in published.find(exhibit="Table II", metric="peak_batch")
        if point.method_name == method and point.context_tokens == context and point.model_name == "llada2-mini"
    ]
    return int(found[0].value)


def _number(point: Point) -> float:
    value = point.number
    assert value is not None, point
    return value


def _named(name: str | None) -> str:
    assert name is not None
    return name


def _known(value: int | None) -> int:
    assert value is not None
    return value
