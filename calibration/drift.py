"""How far a machine's speed at the runs lies from that at calibration, and whether such runs can be judged.

Two rates of the host are known beside a run: that of reading its pool's memory, and that of arithmetic, which bounds
runs whose selections have many queries. One query is bound by reading: arithmetic says nothing of its runs.

What many queries reach is timed itself beside their runs, and beside the profile's selections. Profiles and runs before
that state what the widest unit reached alone; of what queries add to a selection a part follows it (:func:`of_widest`).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calibration import conditions
from calibration.report import MAX_DRIFT
from calibration.runs import Sample
from herald_pipeline.hardware import Profile

ANYWHERE = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs of one point say of the host beside them, in the mean; ``None`` where they do not.

    ``many_queries``: selections score with several queries, so that arithmetic bounds them.
    """

    many_queries: bool
    dram_gb_s: float | None = None
    peak_tflop_s: float | None = None
    many_queries_gb_s: float | None = None

    @property
    def known(self) -> bool:
        """Whether any rate says how predictions are to be made."""
        return any(rate is not None for rate in (self.dram_gb_s, self.peak_tflop_s, self.many_queries_gb_s))


UNKNOWN = Beside(False)


def beside(samples: Sequence[Sample], many_queries: bool) -> Beside:
    """Mean rates of those runs that state them."""
    of_arithmetic = [(s.peak_tflop_s, s.many_queries_gb_s) if many_queries else (None, None) for s in samples]
    return Beside(
        many_queries,
        _mean([s.dram_gb_s for s in samples]),
        _mean([peak for peak, _ in of_arithmetic]),
        _mean([queries for _, queries in of_arithmetic]),
    )


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.fmean(known) if known else None


def unsteady(sample: Sample, many_queries: bool) -> bool:
    """Whether what bounds a run changed speed by more than :data:`MAX_DRIFT` between before and after it."""
    of_arithmetic = many_queries and sample.unsteady_arithmetic is not None
    change = sample.unsteady_arithmetic if of_arithmetic else sample.unsteady
    return change is not None and change > MAX_DRIFT


def slower(found: Beside, met: conditions.Conditions, profile: Profile, raw: Path | None) -> dict[str, float]:
    """How many times as long as at calibration reading (``slower_dram``) and what queries add (``slower_cpu``) took.

    What the runs or the profile do not state is left out. ``met`` are the conditions of the runs.
    """
    times = {}
    if found.dram_gb_s is not None:
        calibrated = conditions.dram_gb_s(profile, met, raw)
        if calibrated is not None:
            times["slower_dram"] = calibrated / found.dram_gb_s
    cpu, threads = profile.machine.cpu, dict(met).get("threads")
    # The runs' rates are of their own threads.
    share = 1.0 if threads is None else conditions.share_of_threads(raw, int(threads))
    if found.many_queries_gb_s is not None and cpu.many_queries_gb_s is not None:
        times["slower_cpu"] = share * cpu.many_queries_gb_s.peak / found.many_queries_gb_s
    elif found.peak_tflop_s is not None and cpu.peak_tflop_s is not None:
        follows = of_widest(cpu.peak_tflop_s.peak)
        times["slower_cpu"] = 1.0 - follows + follows * share * cpu.peak_tflop_s.peak / found.peak_tflop_s
    return times


def of_widest(peak_tflop_s: float) -> float:
    """Share of the time which queries add to a selection that is the widest unit's, at its rate of ``peak_tflop_s``.

    Exponentials, importance and top-k do not use that unit.
    """
    (rate, time), (other_rate, other_time) = _LINES
    per_rate = (other_time - time) / (1.0 / other_rate - 1.0 / rate)
    rest = time - per_rate / rate
    return per_rate / (per_rate + rest * peak_tflop_s)


_LINES = ((27.8, 4.8), (18.3, 6.7))
"""TFLOP/s of the matrix units alone, and nanoseconds that a query adds to a key and thread: two quiet machines, the
kernels by themselves (docs/kernels.md, "A line"). So 0.75 of these follow the units at 29 TFLOP/s. By phases it is 0.72
there: of 144 ns importance takes 20 and exponentials about 20."""


def span(profiles: Sequence[Profile]) -> tuple[float, float]:
    """How many times as slow as at calibration host memory was in its fastest and in its slowest place then."""
    spans = [conditions.dram_span(profile) for profile in profiles]
    return min(fastest for fastest, _ in spans), max(slowest for _, slowest in spans)


def refusal(what: str, drift: float | None, span: tuple[float, float] = ANYWHERE) -> str:
    """Why a point is not judged, or nothing. Twice as fast is as far away as half as fast; ``span`` is no distance."""
    if drift is None or abs(math.log(drift / min(max(drift, span[0]), span[1]))) <= math.log(1 + MAX_DRIFT):
        return ""
    times, word = (drift, "slower") if drift > 1 else (1 / drift, "faster")
    return f"{what} ran {times:.2f} times {word} than when it was calibrated: not judged"
