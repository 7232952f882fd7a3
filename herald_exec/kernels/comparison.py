"""Comparing a selection with the definition: exact where that is owed, tolerant only where it is allowed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .options import Selection
from .reference import Expected

#: Importance below this is zero on every tier (2^-100): such positions tie and the lower one wins.
SMALLEST_IMPORTANCE = 2.0**-100


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative errors.

    Attributes
    ----------
    index
        A differing index must lie within this of the k-th importance.
    output
        Of the largest absolute output of the row.
    importance
        Of each importance value (and of 1e-6 of the largest, for values that a bf16 probability cannot resolve).
    """

    index: float
    output: float
    importance: float


#: fp32 probabilities: sums in another order, a polynomial exponential.
FP32_P = Tolerance(index=1e-5, output=3e-5, importance=3e-5)
#: bf16 probabilities in P x V only: scores and importance stay fp32.
BF16_PV = Tolerance(index=1e-5, output=6e-3, importance=3e-5)
#: bf16 probabilities everywhere: the matrix tiles.
BF16_P = Tolerance(index=5e-3, output=6e-3, importance=8e-3)


def index_problems(
    found: npt.NDArray[np.int32],
    expected: npt.NDArray[np.int32],
    importance: npt.NDArray[np.float64],
    tolerance: float,
    undecided: npt.NDArray[np.bool_] | None = None,
) -> list[str]:
    """What is wrong with one index row, given the importance that defines it.

    Indices must be ascending, in range and as many as expected; one that the definition does not have (or lacks) must
    be as important as the k-th within ``tolerance``. NaN importance allows no difference. With as many ``undecided``
    positions differing, others differ to make up for them.
    """
    if len(found) != len(expected):
        return [f"{len(found)} indices instead of {len(expected)}"]
    if not len(found):
        return []
    if found[0] < 0 or found[-1] >= len(importance) or np.any(np.diff(found) <= 0):
        return ["indices are not ascending, unique and in range"]
    differing = np.setxor1d(found, expected)
    if not len(differing):
        return []
    kth = importance[expected].min()
    allowed = tolerance * kth + SMALLEST_IMPORTANCE
    wrong = [int(at) for at in differing if not abs(importance[at] - kth) <= allowed]
    if undecided is not None and len(differing) <= 2 * np.count_nonzero(undecided[differing]):
        return []
    return [f"position {at} has importance {importance[at]:.6g}, the k-th has {kth:.6g}" for at in wrong[:3]]


@dataclass(frozen=True)
class Comparison:
    """Largest errors of one selection against the definition, and what broke the tolerance."""

    output_error: float
    importance_error: float
    swaps: int
    problems: list[str]


def _error(found: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], floor: float) -> float:
    """Largest |found - expected| / (|expected| + floor); infinite where one is NaN and the other is not."""
    if np.any(np.isfinite(found) != np.isfinite(expected)):
        return float("inf")
    finite = np.isfinite(expected)
    error = np.abs(found[finite] - expected[finite]) / (np.abs(expected[finite]) + floor)
    return float(error.max(initial=0.0))


def compare(found: Selection, expected: Expected, lengths: npt.NDArray[np.int64], tolerance: Tolerance) -> Comparison:
    """Compare with :func:`.reference.select`; both kept their importance where ``found`` has one."""
    problems: list[str] = []
    if expected.importance is None:
        message = "the expected selection must keep its importance"
        raise ValueError(message)
    if not np.array_equal(found.status, expected.status):
        problems.append(f"status {found.status.tolist()} instead of {expected.status.tolist()}")
    output_error = importance_error = 0.0
    swaps = 0
    for row, head in np.ndindex(found.counts.shape):
        length, count = int(lengths[row]), int(found.counts[row, head])
        known = expected.importance[row, head, :length].astype(np.float64)
        mine = found.indices[row, head, :count]
        theirs = expected.indices[row, head, : expected.counts[row, head]]
        decided = np.ones(length, bool)
        if expected.undecided is not None:
            decided = ~expected.undecided[row, head, :length]
        wrong = index_problems(mine, theirs, known, tolerance.index, ~decided)
        problems += [f"row {row} head {head}: {each}" for each in wrong]
        if np.any(found.indices[row, head, count:] != -1):
            problems.append(f"row {row} head {head}: the filler is not -1")
        swaps += len(np.setdiff1d(mine, theirs))
        if found.importance is not None and length:
            floor = SMALLEST_IMPORTANCE / tolerance.importance
            if tolerance.importance > FP32_P.importance:
                floor += 1e-6 * float(np.nanmax(np.abs(known), initial=0.0))
            values = found.importance[row, head, :length].astype(np.float64)
            importance_error = max(importance_error, _error(values[decided], known[decided], floor))
        group = found.output.shape[2] // found.counts.shape[1]
        out = found.output[row, :, head * group : (head + 1) * group].astype(np.float64)
        want = expected.output[row, :, head * group : (head + 1) * group].astype(np.float64)
        if not expected.status[row, head]:
            scale = float(np.abs(want).max(initial=0.0)) + 1e-30
            output_error = max(output_error, _error(out / scale, want / scale, 1.0))
    if output_error > tolerance.output:
        problems.append(f"output error {output_error:.2e} > {tolerance.output:.0e}")
    if importance_error > tolerance.importance:
        problems.append(f"importance error {importance_error:.2e} > {tolerance.importance:.0e}")
    return Comparison(output_error, importance_error, swaps, problems)
