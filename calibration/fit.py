"""``calibration fit``: numbers that no part can isolate, chosen so that runs of a declared training set come out.

Residuals are logarithms of predicted / measured, so that a factor of two counts the same in either direction, whatever
the size. Standard errors follow from the Jacobian at the optimum. A parameter is **not identified** where its standard
error is larger than its value, or where it ends at its border; that is said, and its measured value is kept.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from calibration.points import FIT, Point
from calibration.reconcile import Predict, predictor
from calibration.runs import Sample
from herald_pipeline.errors import ConfigError, ProfileError, did_you_mean
from herald_pipeline.hardware import Curve, Engine, Origin, Profile, Provenance, Quantity, specs
from herald_pipeline.model import ModelShape

DEFAULT_PARAMETERS = ("layer_overhead_us",)
"""What is fitted unless said otherwise: work of a layer that no part isolates (bookkeeping, writes to pools, waiting).

The kernels' own rates stay as they were measured.
"""


@dataclass(frozen=True, slots=True)
class Fitted:
    """One parameter: what it was before, what fits, how sure that is.

    Of a curve, ``before`` and ``value`` are its highest point. ``relative_error`` is the standard error as a share of
    the value.
    """

    name: str
    before: float
    value: float
    relative_error: float
    identified: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit's outcome. ``residual`` is the standard deviation of ln(predicted / measured) that is left."""

    parameters: tuple[Fitted, ...]
    training: tuple[str, ...]
    residual: float
    correlations: tuple[tuple[str, str, float], ...]
    profile: Profile

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "parameters": [
                {name: getattr(fitted, name) for name in fitted.__slots__ if getattr(fitted, name) != ""}
                for fitted in self.parameters
            ],
            "training": list(self.training),
            "residual": self.residual,
            "correlations": [list(pair) for pair in self.correlations],
        }


def fit(
    samples: Sequence[Sample],
    profile: Profile,
    shape: ModelShape,
    names: Sequence[str] = (),
    reference_s: float | None = None,
) -> Fit:
    """Fit engine numbers ``names`` to the training runs (``set`` is ``fit``); held-out runs are not looked at.

    Without ``names``: :data:`DEFAULT_PARAMETERS`.

    With ``reference_s``, the reference's time at the profile's measurement, runs are taken to that speed first: what
    the machine has slowed down since is no property of the engine.

    Raises
    ------
    ConfigError
        No training runs, fewer of them than parameters, or a parameter that the profile does not state.
    """
    names = tuple(names) or DEFAULT_PARAMETERS
    start = _start_values(profile, names)
    targets = _targets(samples, reference_s)
    if len(targets) < len(names):
        raise ConfigError(
            f"{len(targets)} training point(s) for {len(names)} parameter(s); mark at least as many runs set={FIT}"
        )

    def residuals(logs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        predict = _predictor(profile, shape, names, np.exp(logs) / start)
        return np.array(
            [math.log(predict(point).figures["throughput_tok_s"] / rate) for point, rate in targets.items()]
        )

    found = least_squares(residuals, np.log(start), diff_step=0.02)
    values = np.exp(found.x)
    degrees = len(targets) - len(names)
    residual = float(np.sqrt(np.sum(found.fun**2) / degrees)) if degrees else float("nan")
    errors, correlations = _errors(found.jac, residual)
    parameters = tuple(
        _verdict(name, before, float(value), float(error))
        for name, before, value, error in zip(names, start, values, errors, strict=True)
    )
    training = tuple(point.name for point in targets)
    pairs = tuple(
        (names[i], names[j], float(correlations[i, j]))
        for i in range(len(names))
        for j in range(i + 1, len(names))
        if np.isfinite(correlations[i, j])
    )
    return Fit(parameters, training, residual if degrees else 0.0, pairs, _with(profile, parameters, training))


def _targets(samples: Sequence[Sample], reference_s: float | None) -> dict[Point, float]:
    """Median throughput of each training point, at the speed of the profile."""
    groups: dict[Point, list[float]] = {}
    for sample in samples:
        rate = sample.figures.get("throughput_tok_s")
        if sample.point.set != FIT or rate is None:
            continue
        drift = sample.reference_s / reference_s if sample.reference_s and reference_s else 1.0
        groups.setdefault(sample.point, []).append(rate * drift)
    if not groups:
        raise ConfigError(f"no training runs: mark the lines that a fit may see with set={FIT}")
    return {point: statistics.median(rates) for point, rates in groups.items()}


def _start_values(profile: Profile, names: Sequence[str]) -> list[float]:
    known = specs(Engine)
    values, problems = [], []
    for name in names:
        quantity = getattr(profile.engine, name) if name in known else None
        if name not in known:
            problems.append(f"unknown engine number {name!r}{did_you_mean(name, known)}")
        elif quantity is None or quantity.peak <= 0:
            problems.append(f"{name} has no value above 0 in profile {profile.name!r} to start from")
        else:
            values.append(quantity.peak)
    if problems:
        raise ConfigError(problems)
    return values


def _predictor(profile: Profile, shape: ModelShape, names: Sequence[str], factors: Sequence[float]) -> Predict:
    engine = profile.engine
    for name, factor in zip(names, factors, strict=True):
        scaled: dict[str, Any] = {name: _scaled(name, getattr(engine, name), float(factor))}
        engine = replace(engine, **scaled)
    return predictor(replace(profile, engine=engine), shape)


def _scaled(name: str, quantity: Quantity, factor: float) -> Quantity:
    """The quantity times ``factor``, no part of it above what is possible."""
    maximum = specs(Engine)[name].maximum or math.inf
    if isinstance(quantity, Curve):
        return replace(quantity, y=tuple(min(y * factor, maximum) for y in quantity.y))
    return replace(quantity, value=min(quantity.value * factor, maximum))


def _errors(jacobian: npt.NDArray[Any], residual: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Relative standard errors and correlations of the parameters' logarithms."""
    count = jacobian.shape[1]
    curvature = jacobian.T @ jacobian
    if not np.all(np.isfinite(curvature)) or np.linalg.matrix_rank(curvature) < count or not math.isfinite(residual):
        return np.full(count, np.inf), np.full((count, count), np.nan)
    covariance = np.linalg.inv(curvature) * residual**2
    deviations = np.sqrt(np.diag(covariance))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = covariance / np.outer(deviations, deviations)
    return deviations, correlations


def _verdict(name: str, before: float, value: float, error: float) -> Fitted:
    maximum = specs(Engine)[name].maximum
    if maximum is not None and value >= maximum:
        return Fitted(name, before, maximum, error, False, f"ends at its border {maximum:g}")
    if not math.isfinite(error):
        return Fitted(name, before, value, error, False, "the training set does not tell it from the others")
    if error > 1:
        return Fitted(name, before, value, error, False, "its standard error is larger than its value")
    return Fitted(name, before, value, error, True)


def _with(profile: Profile, parameters: Sequence[Fitted], training: Sequence[str]) -> Profile:
    """The profile with what was identified put in place; the rest keeps its measured value."""
    engine = profile.engine
    for fitted in parameters:
        if fitted.identified:
            factor = fitted.value / fitted.before
            quantity = _scaled(fitted.name, getattr(engine, fitted.name), factor)
            origin = Origin(
                Provenance.FITTED,
                spread=round(fitted.relative_error, 4),
                pinned_by=f"throughput of {', '.join(training)}",
                note=f"what was measured in isolation, times {factor:.4g}",
            )
            change: dict[str, Any] = {fitted.name: replace(quantity, origin=origin)}
            engine = replace(engine, **change)
    return replace(profile, engine=engine)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def fitted_tables(found: Fit) -> dict[str, dict[str, Any]]:
    """The ``[fitted]`` tables of a profile file.

    Raises
    ------
    ProfileError
        Nothing was identified.
    """
    tables: dict[str, dict[str, Any]] = {}
    for fitted in found.parameters:
        if not fitted.identified:
            continue
        quantity = getattr(found.profile.engine, fitted.name)
        if isinstance(quantity, Curve):
            values: dict[str, Any] = {
                "x": list(quantity.x),
                "y": [_digits(y) for y in quantity.y],
                "x_unit": quantity.x_unit,
            }
        else:
            values = {"value": _digits(quantity.value)}
        tables[f"engines.{found.profile.engine.name}.{fitted.name}"] = {
            **values,
            "unit": quantity.unit,
            "spread": quantity.origin.spread,
            "pinned_by": quantity.origin.pinned_by,
            "note": quantity.origin.note,
        }
    if not tables:
        reasons = "; ".join(f"{fitted.name}: {fitted.why}" for fitted in found.parameters)
        raise ProfileError(f"no parameter is identified by the training set ({reasons}); nothing was written")
    return tables
