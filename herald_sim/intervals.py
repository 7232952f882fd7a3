"""How far a prediction is known: Monte Carlo over the spreads of the profile's numbers, in fast mode.

Fitted numbers are drawn together where their fit stands beside the profile (their errors are correlated: two that
trade off against each other are each poorly known, what they predict is not), others each by its own stated spread.
What is drawn is a factor, so every number stays positive; shares stay at most 1. The interval is of the numbers only:
what the model leaves out is in the errors that ``herald-sim exhibit fit`` shows.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from herald_pipeline.hardware import Curve, Number, Profile, Quantity
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.workload import Workload
from herald_sim import fast
from herald_sim.exhibits.fits import ALL, files, read

SAMPLES = 32
_FEW_BLOCKS = 6
_WITHIN_95 = 1.96
"""Standard deviations of a normal distribution: the logarithms of the factors are close to one."""


def interval(
    pipeline: Pipeline, profile: Profile, workload: Workload, value: float, *, samples: int = SAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """95% interval around a predicted throughput ``value``; ``None`` where fast mode does not cover the workload.

    The draws give factors on the fast prediction, which are put on ``value``, so that contention stays in it.
    """
    length = pipeline.settings.block_length
    few = tuple(replace(r, new_tokens=min(r.new_tokens, _FEW_BLOCKS * length)) for r in workload.requests)
    short = replace(workload, requests=few)
    if fast.why_not(pipeline, short) is not None:
        return None
    base = fast.evaluate(pipeline, profile, short).throughput_tok_s
    rates = [fast.evaluate(pipeline, drawn, short).throughput_tok_s for drawn in draws(profile, samples, seed=seed)]
    logs = np.log(np.array(rates) / base)
    middle, spread = float(logs.mean()), float(logs.std(ddof=1))
    low, high = (value * float(np.exp(middle + side * _WITHIN_95 * spread)) for side in (-1, 1))
    return low, high


def draws(profile: Profile, samples: int, *, seed: int = 0) -> list[Profile]:
    """``samples`` profiles drawn from the spreads of the profile's numbers."""
    generator = np.random.default_rng(seed)
    names, logs = _joint(profile, samples, generator)
    alone = {
        path: quantity.origin.spread
        for path, _, quantity in profile.quantities()
        if quantity is not None and quantity.origin.spread and path not in names
    }
    columns = dict(zip(names, logs.T, strict=True))
    for path, spread in sorted(alone.items()):
        columns[path] = generator.normal(0.0, spread, samples)
    return [
        with_factors(profile, {path: float(np.exp(column[index])) for path, column in columns.items()})
        for index in range(samples)
    ]


def _joint(profile: Profile, samples: int, generator: np.random.Generator) -> tuple[list[str], NDArray[np.float64]]:
    """Fitted numbers' paths and draws of their logarithms, where the profile's fit is known."""
    path = files(profile).get(ALL)
    if path is None:
        return [], np.empty((samples, 0))
    fit = read(path)
    names = [f"engines.{profile.engine.name}.{name}" for name in fit["names"]]
    covariance = np.array(fit["covariance"])
    return names, generator.multivariate_normal(np.zeros(len(names)), covariance, samples, method="eigh")


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
