"""``calibration reconcile``: prediction beside measurement, for throughput and for every kind of stage.

The **error** is predicted / measured - 1: of a rate, positive means too optimistic; of a time, positive means too slow.
Predictions hold at the speed that the machine had while it was measured. A reference is timed with every calibration
and beside every run; its ratio is the **drift** (1.10: the machine is 10% slower by now). A drift beyond the
reference's own spread scales the prediction, one beyond :data:`MAX_DRIFT` ends in no judgement at all: on a machine
that changes its speed by a third, an error of 15% means nothing.

Where a run says at what rate the memory of its own pool was read right before and right after it, that is the
reference: the drift is the read rate at calibration over the mean of the two, and the prediction is made anew with that
read rate, so that only what reads host memory changes. It is a measurement beside the run and knows nothing of the
run's outcome. A profile's rate is the median of places all over host memory; a pool in a few of them may be as fast as
the best one or as slow as the worst, and is no drift of the machine: only what lies as far beyond these is not judged.

Selections of many queries are bound by arithmetic, whose rate on a virtual machine changes within minutes. Where both a
profile and its runs state it, what selections compute is priced at the runs' rate, as reading is
(:mod:`calibration.drift`).

The **spread** of a figure is between runs, never within one, and the interval of an error follows from both sides'
spreads, pooled over all points (:mod:`calibration.variation`).
"""

import math
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from calibration import conditions, drift
from calibration.points import Point
from calibration.report import MAX_DRIFT, Comparison, PointReport, Report, summary
from calibration.runs import Sample, sample_of
from calibration.variation import COVERAGE, deviation, geometric_mean, pooled, uncertainty
from herald_pipeline import trace
from herald_pipeline.hardware import Profile, Provenance
from herald_pipeline.model import ModelShape
from herald_sim.simulate import simulate


class Predict(Protocol):
    """How a profile predicts a point."""

    def __call__(self, point: Point, /, slower_dram: float = 1.0, slower_cpu: float = 1.0) -> Sample:
        """The point's figures, with host memory and the host's arithmetic so many times as slow as the profile's."""


RATES = frozenset({"throughput_tok_s"})


@dataclass(frozen=True, slots=True)
class Calibration:
    """One measurement of the machine: how it predicts, and the reference at that time.

    ``reference_spread`` is the reference's relative standard deviation between the parts of the measurement; ``raw`` is
    the folder of the profile's raw tables.
    """

    profile: Profile
    predict: Predict
    reference_s: float | None = None
    reference_spread: float = 0.0
    raw: Path | None = None


def predictor(profile: Profile, shape: ModelShape, *, traced: bool = False, raw: Path | None = None) -> Predict:
    """Simulate a point on the profile; ``traced`` gives medians of launches, as of real runs, and takes longer.

    ``raw`` is the folder of the profile's raw tables, which some conditions of a point need. Memory is no matter here:
    what is compared has run.
    """

    def predict(point: Point, /, slower_dram: float = 1.0, slower_cpu: float = 1.0) -> Sample:
        pipeline, work = point.pipeline(shape), point.workload()
        met = conditions.slowed(conditions.under(profile, point.conditions, raw), slower_dram, slower_cpu)
        if not traced:
            return sample_of(point, simulate(pipeline, met, work, beyond_memory=True))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            result = simulate(pipeline, met, work, beyond_memory=True, trace_out=path)
            return sample_of(point, result, trace.read_chrome(path))

    return predict


def reconcile(samples: Iterable[Sample], shape: ModelShape, calibrations: Sequence[Calibration]) -> Report:
    """Compare runs with predictions, point by point."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.point.key, []).append(sample)
    points = [_point(group, shape, calibrations) for group in groups.values()]
    points = _with_uncertainty(points, len(calibrations))
    profile = calibrations[0].profile
    fitted = tuple(
        path for path, _, q in profile.quantities() if q is not None and q.origin.provenance is Provenance.FITTED
    )
    return Report(profile.name, shape.name, tuple(points), fitted, _notes(calibrations), summary(points))


def _notes(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    notes = []
    references = [c.reference_s for c in calibrations if c.reference_s is not None]
    if not references:
        notes.append("no reference beside the profile: drift of the machine is not known")
    if len(calibrations) == 1 and references:
        notes.append("measured once: how far a second measurement would predict otherwise is not known (--again)")
    elif len(references) == len(calibrations):
        change = max(references) / min(references) - 1
        notes.append(f"measured before and after the runs: the reference differs by {change:.0%} between the two")
    return tuple(notes)


# Points --------------------------------------------------------------------------------------------------------------


def _point(samples: Sequence[Sample], shape: ModelShape, calibrations: Sequence[Calibration]) -> PointReport:
    point = samples[0].point
    many_queries = point.pipeline(shape).settings.queries > 1
    counted, notes, changed = _counted(samples, many_queries)
    plain = [calibration.predict(point) for calibration in calibrations]
    host = drift.beside(counted, many_queries)
    if host.known:
        slower = [drift.slower(host, point.conditions, c.profile, c.raw) for c in calibrations]
        predictions = [c.predict(point, **s) if s else p for p, s, c in zip(plain, slower, calibrations, strict=True)]
        met, cpu = (_mean([s.get(name) for s in slower]) for name in ("slower_dram", "slower_cpu"))
        span = drift.span([calibration.profile for calibration in calibrations])
    else:
        drifts = [_reference_drift(counted, calibration) for calibration in calibrations]
        each = zip(plain, drifts, calibrations, strict=True)
        predictions = [_scaled(found, _used(slow, c, len(counted))) for found, slow, c in each]
        met, cpu, span = _mean(drifts), None, drift.ANYWHERE
    stages = dict.fromkeys(name for sample in counted for name in sample.stages)
    unpredicted = [name for name in stages if name not in predictions[0].stages]
    if unpredicted:
        notes.append(f"measured, not in the description: {', '.join(unpredicted)}")
    names = dict.fromkeys(name for sample in counted for name in sample.figures)
    figures = [_compare(name, "figures", counted, plain, predictions) for name in names]
    compared = [_compare(name, "stages", counted, plain, predictions) for name in stages]
    return PointReport(
        point,
        met,
        tuple(found for found in figures if found is not None),
        tuple(found for found in compared if found is not None),
        tuple(notes),
        changed or drift.refusal("the machine", met, span) or drift.refusal("the host's arithmetic", cpu),
        host.dram_gb_s,
        cpu,
    )


def _counted(samples: Sequence[Sample], many_queries: bool) -> tuple[Sequence[Sample], list[str], str]:
    """The runs that count, notes on them, and why none of them is judged, or nothing."""
    steady = [sample for sample in samples if not drift.unsteady(sample, many_queries)]
    notes = []
    # Two runs at least: with fewer, which of them was disturbed cannot be told.
    counted = steady if len(steady) >= min(2, len(samples)) else list(samples)
    if len(counted) < len(samples):
        notes.append(f"{len(samples) - len(counted)} of {len(samples)} runs not counted: speed changed during them")
    if len(samples) == 1:
        notes.append("a single run: no spread can be given")
    if not any("throughput_tok_s" in sample.figures for sample in counted):
        notes.append("no throughput: the runs' makespan is 0 or fewer than two blocks were decoded")
    runs = "it" if len(samples) == 1 else "each run"
    return counted, notes, "" if steady else f"speed changed by more than {MAX_DRIFT:.0%} during {runs}: not judged"


def _mean(drifts: Sequence[float | None]) -> float | None:
    known = [found for found in drifts if found is not None]
    return geometric_mean(known) if known else None


def _reference_drift(samples: Sequence[Sample], calibration: Calibration) -> float | None:
    times = [sample.reference_s for sample in samples if sample.reference_s]
    return statistics.median(times) / calibration.reference_s if times and calibration.reference_s else None


def _used(drift: float | None, calibration: Calibration, runs: int) -> float:
    """The drift that scales a prediction: 1 where it is not beyond what the reference itself varies by."""
    if drift is None:
        return 1.0
    noise = COVERAGE * calibration.reference_spread / math.sqrt(runs)
    return drift if abs(math.log(drift)) > noise else 1.0


def _scaled(prediction: Sample, drift: float) -> Sample:
    """A prediction for a machine that is as many times slower in everything."""
    figures = {name: value / drift if name in RATES else value * drift for name, value in prediction.figures.items()}
    return replace(prediction, figures=figures, stages={name: s * drift for name, s in prediction.stages.items()})


def _compare(
    name: str, kind: str, samples: Sequence[Sample], unscaled: Sequence[Sample], predictions: Sequence[Sample]
) -> Comparison | None:
    """Median of the runs against the mean of the predictions, or ``None`` where one side has no such figure.

    ``unscaled`` leave the drift out.
    """
    values = [getattr(sample, kind)[name] for sample in samples if name in getattr(sample, kind)]
    plain, met = ([getattr(one, kind).get(name, 0.0) for one in found] for found in (unscaled, predictions))
    if not values or not all(plain) or not all(met) or min(values) <= 0:
        return None
    measured, predicted = statistics.median(values), geometric_mean(met)
    shares = [sample.shares[name] for sample in samples if name in sample.shares]
    tails = [sample.tails[name] for sample in samples if name in sample.tails]
    return Comparison(
        name,
        measured,
        predicted,
        predicted / measured - 1,
        len(values),
        geometric_mean(plain) / measured - 1,
        deviation(values),
        deviation(met),
        None,
        statistics.median(shares) if shares else None,
        statistics.median(tails) if tails else None,
    )


def _with_uncertainty(points: Sequence[PointReport], calibrations: int) -> list[PointReport]:
    """Every error with its interval: deviations pooled over all points, of each figure and each kind of stage."""
    kinds: dict[str, list[Comparison]] = {}
    for report in points:
        for comparison in (*report.figures, *report.stages):
            kinds.setdefault(comparison.quantity, []).append(comparison)
    measured = {name: pooled(c.spread for c in found) for name, found in kinds.items()}
    predicted = {name: pooled(c.predicted_spread for c in found) for name, found in kinds.items()}

    def known(comparison: Comparison) -> Comparison:
        name = comparison.quantity
        return replace(
            comparison, uncertainty=uncertainty(measured[name], comparison.runs, predicted[name], calibrations)
        )

    return [
        replace(report, figures=tuple(map(known, report.figures)), stages=tuple(map(known, report.stages)))
        for report in points
    ]
