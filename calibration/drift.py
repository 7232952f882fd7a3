"""How far a machine's speed at the runs lies from that at calibration, and whether such runs can be judged.

Two rates of the host are known beside a run: that of reading its pool's memory, and that of the kernels' widest
arithmetic, which bounds runs whose selections have many queries. One query is bound by reading: arithmetic says nothing
of its runs.
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
    dram_gb_s: float | None
    peak_tflop_s: float | None

    @property
    def known(self) -> bool:
        """Whether any rate says how predictions are to be made."""
        return self.dram_gb_s is not None or self.peak_tflop_s is not None


UNKNOWN = Beside(False, None, None)


def beside(samples: Sequence[Sample], many_queries: bool) -> Beside:
    """Mean rates of those runs that state them."""
    read = [sample.dram_gb_s for sample in samples if sample.dram_gb_s is not None]
    peaks = [sample.peak_tflop_s for sample in samples if many_queries and sample.peak_tflop_s is not None]
    return Beside(many_queries, statistics.fmean(read) if read else None, statistics.fmean(peaks) if peaks else None)


def unsteady(sample: Sample, many_queries: bool) -> bool:
    """Whether what bounds a run changed speed by more than :data:`MAX_DRIFT` between before and after it."""
    of_arithmetic = many_queries and sample.unsteady_peak is not None
    change = sample.unsteady_peak if of_arithmetic else sample.unsteady
    return change is not None and change > MAX_DRIFT


def slower(found: Beside, met: conditions.Conditions, profile: Profile, raw: Path | None) -> dict[str, float]:
    """How many times as slow as at calibration memory (``slower_dram``) and arithmetic (``slower_cpu``) ran.

    What the runs or the profile do not state is left out. ``met`` are the conditions of the runs.
    """
    times = {}
    if found.dram_gb_s is not None:
        calibrated = conditions.dram_gb_s(profile, met, raw)
        if calibrated is not None:
            times["slower_dram"] = calibrated / found.dram_gb_s
    peak, threads = profile.machine.cpu.peak_tflop_s, dict(met).get("threads")
    if found.peak_tflop_s is not None and peak is not None:
        # The runs' rate is of their own threads.
        share = 1.0 if threads is None else conditions.share_of_threads(raw, int(threads))
        times["slower_cpu"] = share * peak.peak / found.peak_tflop_s
    return times


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
