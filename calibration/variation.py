"""How far repeated values differ, from few of them: the standard deviation that their range implies.

Two or three runs are too few for quartiles, and what varies between runs (other programs, clocks, where memory lies)
does not show within one. So a spread stated here is always **between** runs, and rests on the range, which hides no
outlier. Deviations of several points are pooled: one point's three runs say little, forty-five runs of fifteen points
say how this machine repeats itself.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

_RANGE_OF_NORMAL = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970, 10: 3.078}
"""Mean range of n values of a normal distribution with standard deviation 1 (the d2 of control charts)."""
COVERAGE = 2.0
"""Standard deviations of a stated interval: about 95 of 100."""


def deviation(values: Sequence[float]) -> float | None:
    """Relative standard deviation (of the logarithms) between runs; ``None`` for a single one."""
    if len(values) < 2:
        return None
    logs = [math.log(value) for value in values]
    factor = _RANGE_OF_NORMAL.get(len(logs))
    return statistics.stdev(logs) if factor is None else (max(logs) - min(logs)) / factor


def pooled(deviations: Iterable[float | None]) -> float | None:
    """Root mean square of the deviations that are known."""
    known = [value for value in deviations if value is not None]
    return math.sqrt(sum(value**2 for value in known) / len(known)) if known else None


def uncertainty(measured: float | None, runs: int, predicted: float | None, calibrations: int) -> float | None:
    """Half width of the interval of an error: both sides' deviations, each over how often it was repeated.

    ``None`` where the runs were not repeated: then nothing is known. A prediction from one calibration adds nothing,
    and the report says so.
    """
    if measured is None:
        return None
    variance = measured**2 / runs + ((predicted or 0.0) ** 2) / calibrations
    return COVERAGE * math.sqrt(variance)


def geometric_mean(values: Sequence[float]) -> float:
    """Mean of values that differ by factors."""
    return values[0] if len(values) == 1 else math.exp(sum(math.log(value) for value in values) / len(values))
