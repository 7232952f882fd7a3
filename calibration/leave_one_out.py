"""Leave-one-out: every observation predicted by a fit of all the others, each fit started from the full one.

Leaving one of many observations out moves a least-squares solution little, so the full fit's Jacobian serves all of
them: each fit takes Gauss-Newton steps with it, within the bounds and only downhill, and the model is evaluated once a
step instead of once a parameter and step. At a linear model the first step is exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

Array = NDArray[np.float64]

_STEPS = 4
_SHORTER = (1.0, 0.5, 0.25)
"""Parts of a step that are tried in turn until the sum of squares falls."""
_SETTLED = 0.01
"""A step that improves chi2 by less than this share ends a fit."""


class Held(NamedTuple):
    """One observation left out: the parameters that the others give, and its own residual there."""

    observation: int
    x: Array
    residual: float


def jacobian(residuals: Callable[[Array], Array], x: Array, step: float) -> Array:
    """Derivatives of the residuals by central differences of ``step``, one column a parameter."""
    columns = []
    for at in range(len(x)):
        change = np.zeros_like(x)
        change[at] = step
        columns.append((residuals(x + change) - residuals(x - change)) / (2 * step))
    return np.stack(columns, axis=1)


def leave_one_out(
    residuals: Callable[[Array], Array],
    x: Array,
    slopes: Array,
    bounds: tuple[Array, Array],
    report: Callable[[str], None],
) -> list[Held]:
    """Each observation predicted by the others.

    Parameters
    ----------
    residuals
        Parameters -> one weighted residual an observation.
    x
        The full fit's solution.
    slopes
        Its Jacobian there, observations by parameters.
    bounds
        Lowest and highest parameters.
    """
    count = len(slopes)
    found = []
    for index in range(count):
        kept = np.arange(count) != index
        at = _refit(residuals, x, slopes[kept], kept, bounds)
        found.append(Held(index, at, float(residuals(at)[index])))
        report(f"left out {index + 1} of {count}")
    return found


def _refit(
    residuals: Callable[[Array], Array],
    x: Array,
    slopes: Array,
    kept: NDArray[np.bool_],
    bounds: tuple[Array, Array],
) -> Array:
    """Parameters that fit the observations ``kept``, from those that fit all."""
    now = residuals(x)[kept]
    for _ in range(_STEPS):
        low, high = (np.minimum(bounds[0] - x, 0.0), np.maximum(bounds[1] - x, 0.0))
        # lsq_linear wants room between its bounds.
        step = lsq_linear(slopes, -now, bounds=(low - 1e-12, high + 1e-12)).x
        before = float(now @ now)
        for part in _SHORTER:
            tried = np.clip(x + part * step, *bounds)
            then = residuals(tried)[kept]
            if float(then @ then) < before:
                x, now = tried, then
                break
        if before - float(now @ now) < _SETTLED * before:
            break
    return x
