"""``calibration reconcile``: prediction beside measurement, for throughput and for every kind of stage.

The **error** is predicted / measured - 1: of a rate, positive means too optimistic; of a time, positive means too slow.
The **spread** of a measured figure is over its runs; a single run has none, and that is said. The **drift** is how much
longer the reference takes beside the runs than with the profile: 1.10 means that the machine is 10% slower by now.
``corrected`` errors compare with the prediction at that speed. What is judged is the plain error: a fit to runs that
were taken in turn with the others holds at the speed of all of them.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from calibration.points import FIT, HELD_OUT, Point
from calibration.runs import Sample, sample_of
from calibration.timing import spread
from herald_pipeline.hardware import Profile, Provenance
from herald_pipeline.model import ModelShape
from herald_sim.simulate import simulate

Predict = Callable[[Point], Sample]

THROUGHPUT_BAR, STAGE_BAR = 0.15, 0.25
"""What a prediction is held to on held-out points: throughput, and each kind of stage."""
_SMALL_SHARE = 0.01
"""A stage kind below this share of all busy time is listed and not judged."""
RATES = frozenset({"throughput_tok_s"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one point: medians of the runs, the prediction, the signed error."""

    quantity: str
    measured: float
    predicted: float
    error: float
    runs: int
    spread: float | None
    corrected_error: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class PointReport:
    """A point with all comparisons that could be made, and what could not be and why."""

    point: Point
    drift: float | None
    figures: tuple[Comparison, ...]
    stages: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()

    @property
    def throughput(self) -> Comparison | None:
        """The throughput's comparison, where the runs had one."""
        return next((figure for figure in self.figures if figure.quantity == "throughput_tok_s"), None)


@dataclass(frozen=True, slots=True)
class Report:
    """All points, and what they amount to."""

    hardware: str
    model: str
    points: tuple[PointReport, ...]
    fitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what could not be derived is absent."""
        return {
            "hardware": self.hardware,
            "model": self.model,
            "fitted": list(self.fitted),
            "points": [_point_dict(report) for report in self.points],
            "summary": self.summary,
            "notes": list(self.notes),
        }


def predictor(profile: Profile, shape: ModelShape) -> Predict:
    """Simulate a point on the profile."""

    def predict(point: Point) -> Sample:
        result = simulate(point.pipeline(shape), profile, point.workload())
        return sample_of(point, result)

    return predict


def reconcile(
    samples: Iterable[Sample], profile: Profile, shape: ModelShape, reference_s: float | None, predict: Predict
) -> Report:
    """Compare runs with predictions, point by point."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.point.key, []).append(sample)
    points = tuple(_point(group, predict(group[0].point), reference_s) for group in groups.values())
    fitted = tuple(
        path for path, _, q in profile.quantities() if q is not None and q.origin.provenance is Provenance.FITTED
    )
    notes = []
    if reference_s is None:
        notes.append("no reference beside the profile: drift of the machine is not known")
    return Report(profile.name, shape.name, points, fitted, tuple(notes), summary(points))


def _point(samples: Sequence[Sample], predicted: Sample, reference_s: float | None) -> PointReport:
    point = samples[0].point
    drift = _drift(samples, reference_s)
    notes = []
    if len(samples) == 1:
        notes.append("a single run: no spread can be given")
    if not any("throughput_tok_s" in sample.figures for sample in samples):
        notes.append("no throughput: the runs' makespan is 0 or fewer than two blocks were decoded")
    names = dict.fromkeys(name for sample in samples for name in sample.figures)
    stages = dict.fromkeys(name for sample in samples for name in sample.stages)
    unpredicted = [name for name in stages if name not in predicted.stages]
    if unpredicted:
        notes.append(f"measured, not in the description: {', '.join(unpredicted)}")
    figures = [
        _compare(name, [s.figures[name] for s in samples if name in s.figures], predicted.figures[name], drift)
        for name in names
        if name in predicted.figures and predicted.figures[name] > 0
    ]
    compared = [
        _compare(
            name,
            [s.stages[name] for s in samples if name in s.stages],
            predicted.stages[name],
            drift,
            _share(samples, name),
        )
        for name in stages
        if predicted.stages.get(name)
    ]
    return PointReport(point, drift, tuple(figures), tuple(compared), tuple(notes))


def _share(samples: Sequence[Sample], stage: str) -> float | None:
    shares = [sample.shares[stage] for sample in samples if stage in sample.shares]
    return statistics.median(shares) if shares else None


def _drift(samples: Sequence[Sample], reference_s: float | None) -> float | None:
    times = [sample.reference_s for sample in samples if sample.reference_s]
    return statistics.median(times) / reference_s if times and reference_s else None


def _compare(
    name: str, values: Sequence[float], predicted: float, drift: float | None, share: float | None = None
) -> Comparison:
    measured = statistics.median(values)
    corrected = None
    if drift is not None:
        now = predicted / drift if name in RATES else predicted * drift
        corrected = now / measured - 1
    known = spread(tuple(values)) if len(values) > 1 else None
    return Comparison(name, measured, predicted, predicted / measured - 1, len(values), known, corrected, share)


def summary(points: Sequence[PointReport]) -> dict[str, Any]:
    """What the held-out points amount to: worst and median errors, and whether they stay within the bar."""
    found: dict[str, Any] = {"throughput_bar": THROUGHPUT_BAR, "stage_bar": STAGE_BAR}
    for name in (FIT, HELD_OUT):
        chosen = [point for point in points if point.point.set == name]
        rates = [point.throughput for point in chosen if point.throughput is not None]
        found[name] = {"points": len(chosen), **_errors(rates, THROUGHPUT_BAR)}
    held = [point for point in points if point.point.set == HELD_OUT]
    kinds = dict.fromkeys(stage.quantity for point in held for stage in point.stages)
    found["stages"] = {
        kind: _errors([s for point in held for s in point.stages if s.quantity == kind], STAGE_BAR) for kind in kinds
    }
    return found


def _errors(comparisons: Sequence[Comparison], bar: float) -> dict[str, Any]:
    if not comparisons:
        return {}
    errors = [c.error for c in comparisons]
    shares = [c.share for c in comparisons if c.share is not None]
    found = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors, key=abs),
        "within_bar": sum(abs(error) <= bar for error in errors),
        "of": len(errors),
    }
    return found | ({"share_of_busy_time": statistics.median(shares)} if shares else {})


def judged(report: Report) -> dict[str, bool]:
    """Whether the held-out throughput, and each stage kind of weight (in the median), stay within the bar."""
    held = report.summary.get(HELD_OUT, {})
    verdict = {"throughput": bool(held.get("of")) and held["within_bar"] == held["of"]}
    for kind, errors in report.summary["stages"].items():
        if errors and errors.get("share_of_busy_time", 1.0) >= _SMALL_SHARE:
            verdict[kind] = abs(errors["median_error"]) <= STAGE_BAR
    return verdict


def _point_dict(report: PointReport) -> dict[str, Any]:
    def plain(comparison: Comparison) -> dict[str, Any]:
        return {name: value for name, value in asdict(comparison).items() if value is not None}

    point = {name: value for name, value in asdict(report.point).items() if value is not None}
    found: dict[str, Any] = {**point}
    if report.drift is not None:
        found["drift"] = report.drift
    found["figures"] = {c.quantity: plain(c) for c in report.figures}
    found["stages"] = {c.quantity: plain(c) for c in report.stages}
    found["notes"] = list(report.notes)
    return found
