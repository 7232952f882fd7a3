"""What a reconciliation found: comparisons by point, and what the held-out ones amount to.

Made by :mod:`calibration.reconcile`, written as JSON, printed by :mod:`calibration.text`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from calibration.points import FIT, HELD_OUT, Point, names
from calibration.stage_causes import Evidence, cause
from calibration.variation import pooled

THROUGHPUT_BAR, STAGE_BAR = 0.15, 0.25
"""What a prediction is held to on held-out points: throughput, and each kind of stage."""
MAX_DRIFT = 0.30
"""A run during which, or a point since whose calibration, the machine changed speed by more is not judged."""
_SMALL_SHARE = 0.01
"""A stage kind below this share of all busy time is listed and not judged."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one point: median of the runs, the prediction at their speed, the signed error.

    ``plain_error`` leaves the drift out. ``spread`` and ``predicted_spread`` are between runs and between calibrations;
    ``uncertainty`` is the half width of the error's interval (95%).
    """

    quantity: str
    measured: float
    predicted: float
    error: float
    runs: int
    plain_error: float
    spread: float | None = None
    predicted_spread: float | None = None
    uncertainty: float | None = None
    share: float | None = None
    tail: float | None = None


@dataclass(frozen=True, slots=True)
class PointReport:
    """A point with all comparisons that could be made, and what could not be and why. ``refused`` ends judgement.

    ``dram_gb_s`` is host memory's read rate beside the runs, where they say it: the drift is of that rate then.
    ``cpu_drift`` is the same of the host's arithmetic, for runs that it bounds.
    """

    point: Point
    drift: float | None
    figures: tuple[Comparison, ...]
    stages: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    refused: str = ""
    dram_gb_s: float | None = None
    cpu_drift: float | None = None

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

    def names(self) -> list[str]:
        """What a table calls each point; no two alike."""
        return names([report.point for report in self.points])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what could not be derived is absent."""
        return {
            "hardware": self.hardware,
            "model": self.model,
            "fitted": list(self.fitted),
            "points": [
                {"name": name, **_point_dict(report)} for name, report in zip(self.names(), self.points, strict=True)
            ],
            "summary": self.summary,
            "notes": list(self.notes),
        }


# What it amounts to --------------------------------------------------------------------------------------------------


def summary(points: Sequence[PointReport]) -> dict[str, Any]:
    """What the held-out points amount to: worst and median errors, and whether they stay within the bar."""
    found: dict[str, Any] = {"throughput_bar": THROUGHPUT_BAR, "stage_bar": STAGE_BAR}
    for name in (FIT, HELD_OUT):
        chosen = [point for point in points if point.point.set == name]
        rates = [point.throughput for point in chosen if point.throughput is not None and not point.refused]
        refused = sum(bool(point.refused) for point in chosen)
        found[name] = {"points": len(chosen), "refused": refused, **_errors(rates, THROUGHPUT_BAR)}
    held = [point for point in points if point.point.set == HELD_OUT and not point.refused]
    kinds = dict.fromkeys(stage.quantity for point in held for stage in point.stages)
    found["stages"] = {kind: _stage([s for p in held for s in p.stages if s.quantity == kind]) for kind in kinds}
    return found


def _errors(comparisons: Sequence[Comparison], bar: float) -> dict[str, Any]:
    if not comparisons:
        return {}
    errors = [c.error for c in comparisons]
    known = {
        "median_error": statistics.median(errors),
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "worst_error": max(errors, key=abs),
        "within_bar": sum(abs(error) <= bar for error in errors),
        "of": len(errors),
        "spread": pooled(c.spread for c in comparisons),
        "uncertainty": pooled(c.uncertainty for c in comparisons),
    }
    return {name: value for name, value in known.items() if value is not None}


def _stage(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """A stage kind over all held-out points, with what its errors come from."""
    found = _errors(comparisons, STAGE_BAR)
    shares = [c.share for c in comparisons if c.share is not None]
    tails = [c.tail for c in comparisons if c.tail is not None]
    found["measured_s"] = statistics.median(c.measured for c in comparisons)
    found["predicted_s"] = statistics.median(c.predicted for c in comparisons)
    if shares:
        found["share_of_busy_time"] = statistics.median(shares)
    evidence = Evidence(
        tuple(c.error for c in comparisons),
        tuple(c.measured for c in comparisons),
        found.get("spread"),
        statistics.median(tails) if tails else None,
    )
    return found | {"cause": cause(evidence, STAGE_BAR)}


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
    if report.dram_gb_s is not None:
        found["dram_gb_s"] = report.dram_gb_s
    if report.cpu_drift is not None:
        found["cpu_drift"] = report.cpu_drift
    if report.refused:
        found["refused"] = report.refused
    found["figures"] = {c.quantity: plain(c) for c in report.figures}
    found["stages"] = {c.quantity: plain(c) for c in report.stages}
    found["notes"] = list(report.notes)
    return found
