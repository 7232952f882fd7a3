"""How far a prediction is known: Monte Carlo over the spreads of the profile's numbers, contention left out.

Fitted numbers are drawn together where their fit stands beside the profile (their errors are correlated: two that
trade off against each other are each poorly known, what they predict is not), others each by its own stated spread.
What is drawn is a factor, so every number stays positive; shares stay at most 1. The interval is of the numbers only:
what the model leaves out is in the errors that ``herald-sim exhibit fit`` shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log, sqrt
from random import Random
from statistics import fmean, stdev
from typing import Any

from herald_pipeline.hardware import Curve, Number, Profile, Quantity
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.workload import Workload
from herald_sim.fit_files import ALL, files, read
from herald_sim.uncontended import Uncontended, why_not

SAMPLES = 32
_FEW_BLOCKS = 6
_ROUNDING = 1e-12
_WITHIN_95 = 1.96
"""Standard deviations of a normal distribution: the logarithms of the factors are close to one."""


def interval(
    pipeline: Pipeline, profile: Profile, workload: Workload, value: float, *, samples: int = SAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """95% interval around a predicted throughput ``value``; ``None`` where a run without contention does not cover it.

    The draws give factors on the prediction without contention, which are put on ``value``: contention stays in it.
    """
    length = pipeline.settings.block_length
    few = tuple(replace(r, new_tokens=min(r.new_tokens, _FEW_BLOCKS * length)) for r in workload.requests)
    short = replace(workload, requests=few)
    if why_not(pipeline, short) is not None:
        return None
    run = Uncontended(pipeline, short)
    base = run.throughput_tok_s(profile)
    logs = [log(run.throughput_tok_s(drawn) / base) for drawn in draws(profile, samples, seed=seed)]
    middle, spread = fmean(logs), stdev(logs)
    low, high = (value * exp(middle + side * _WITHIN_95 * spread) for side in (-1, 1))
    return low, high


def draws(profile: Profile, samples: int, *, seed: int = 0) -> list[Profile]:
    """``samples`` profiles drawn from the spreads of the profile's numbers."""
    random = Random(seed)
    names, factor = _joint(profile)
    alone = {
        path: quantity.origin.spread
        for path, _, quantity in profile.quantities()
        if quantity is not None and quantity.origin.spread and path not in names
    }
    drawn = []
    for _ in range(samples):
        normal = [random.gauss(0.0, 1.0) for _ in names]
        logs = {
            name: sum(share * z for share, z in zip(row, normal, strict=False))
            for name, row in zip(names, factor, strict=True)
        }
        logs.update({path: random.gauss(0.0, spread) for path, spread in sorted(alone.items())})
        drawn.append(with_factors(profile, {path: exp(value) for path, value in logs.items()}))
    return drawn


def _joint(profile: Profile) -> tuple[list[str], list[list[float]]]:
    """Fitted numbers' paths and the lower factor of their logarithms' covariance, where the profile's fit is known."""
    path = files(profile).get(ALL)
    if path is None:
        return [], []
    fit = read(path)
    names = [f"engines.{profile.engine.name}.{name}" for name in fit["names"]]
    return names, lower_factor(fit["covariance"])


def lower_factor(covariance: Sequence[Sequence[float]]) -> list[list[float]]:
    """Rows of the triangle L with L times its transpose = ``covariance`` (Cholesky); row i has i + 1 entries.

    A number that the others determine, up to rounding, adds nothing of its own.
    """
    rows: list[list[float]] = []
    for at, line in enumerate(covariance):
        row: list[float] = []
        for before in range(at):
            known = sum(one * other for one, other in zip(row, rows[before], strict=False))
            pivot = rows[before][before]
            row.append((line[before] - known) / pivot if pivot else 0.0)
        left = line[at] - sum(value * value for value in row)
        row.append(sqrt(left) if left > _ROUNDING * line[at] else 0.0)
        rows.append(row)
    return rows


def with_factors(profile: Profile, factors: dict[str, float]) -> Profile:
    """``profile`` with quantities, named by their paths, times a factor."""
    machine, engine = profile.machine, profile.engine
    sections: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}
    for path, spec, quantity in profile.quantities():
        factor = factors.get(path)
        if factor is None or quantity is None:
            continue
        value = _times(quantity, factor, spec.maximum)
        *where, name = path.split(".")
        if where[0] == "machine":
            sections.setdefault(where[1], {})[name] = value
        else:
            changed[name] = value
    parts = {section: replace(getattr(machine, section), **values) for section, values in sections.items()}
    return replace(profile, machine=replace(machine, **parts), engine=replace(engine, **changed))


def _times(quantity: Quantity, factor: float, maximum: float | None) -> Quantity:
    def bounded(value: float) -> float:
        return value * factor if maximum is None else min(maximum, value * factor)

    if isinstance(quantity, Number):
        return replace(quantity, value=bounded(quantity.value))
    assert isinstance(quantity, Curve)
    return replace(quantity, y=tuple(bounded(value) for value in quantity.y))
