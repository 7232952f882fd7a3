"""``calibration diff``: two traces, results, profiles or reports of reconcile, with signed relative differences.

What the files are is found from their content. Both must be of one kind; a figure that one of them could not derive
(a run without makespan has no throughput) is left out and named.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from calibration.points import Point, names
from herald_pipeline import hardware_io, trace
from herald_pipeline.errors import ConfigError, read_failure
from herald_pipeline.hardware import Curve, Number, Profile, Quantity
from herald_pipeline.units import NS_PER_S

TRACE, RESULT, PROFILE, REPORT = "trace", "result", "profile", "report"


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of both sides; ``relative`` is second / first - 1."""

    name: str
    unit: str
    first: float
    second: float

    @property
    def relative(self) -> float | None:
        """Signed relative difference; ``None`` where the first is 0."""
        return self.second / self.first - 1 if self.first else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences of two files, and what only one of them has."""

    kind: str
    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without a NaN or an infinity anywhere."""
        rows = []
        for difference in self.differences:
            row: dict[str, Any] = {
                "name": difference.name,
                "unit": difference.unit,
                "first": difference.first,
                "second": difference.second,
            }
            if difference.relative is not None:
                row["relative"] = difference.relative
            rows.append(row)
        return {
            "kind": self.kind,
            "differences": rows,
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "notes": list(self.notes),
        }


def diff(first: Path, second: Path) -> Comparison:
    """Compare two files of one kind.

    Raises
    ------
    ConfigError
        A file is of no known kind, or the two are of different kinds.
    """
    kinds = kind_of(first), kind_of(second)
    if kinds[0] != kinds[1]:
        raise ConfigError(f"{first} is a {kinds[0]} and {second} is a {kinds[1]}; compare two of one kind")
    notes: tuple[str, ...] = ()
    if kinds[0] == TRACE:
        values = [trace_figures(trace.read_chrome(path)) for path in (first, second)]
    elif kinds[0] == PROFILE:
        profiles = [hardware_io.resolve(path) for path in (first, second)]
        values = [profile_figures(profile) for profile in profiles]
        notes = tuple(_provenance_changes(*profiles))
    elif kinds[0] == REPORT:
        contents = [_json(path) for path in (first, second)]
        values = report_figures(*contents)
        notes = (agreement(*contents),)
    else:
        values = [result_figures(_json(path)) for path in (first, second)]
        notes = tuple(_underived(first, values[0])) + tuple(_underived(second, values[1]))
    return _compare(kinds[0], values[0], values[1], notes)


def kind_of(path: Path) -> str:
    """Which kind of file this is, by its content."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    if path.suffix == ".toml":
        return PROFILE
    if path.suffix == ".gz":
        return TRACE
    content = _json(path)
    if "traceEvents" in content:
        return TRACE
    if "source" in content and "batch" in content:
        return RESULT
    if "points" in content and "summary" in content:
        return REPORT
    raise ConfigError(
        f"{path} is neither a trace (--trace-out), nor a result (--json), nor a profile (TOML), nor a reconcile.json"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read as JSON: {read_failure(problem)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


Figures = dict[str, tuple[float, str]]


def trace_figures(found: trace.Trace) -> Figures:
    """Makespan; busy time and idle time of each stream; launches and mean time of each stage."""
    if not found.spans:
        return {}
    start = min(span.start_ns for span in found.spans)
    makespan = max(span.end_ns for span in found.spans) - start
    figures: Figures = {"makespan": (makespan / NS_PER_S, "s")}
    for stream in dict.fromkeys(span.stream for span in found.spans):
        busy = sum(span.end_ns - span.start_ns for span in found.spans if span.stream == stream)
        figures[f"stream {stream}: busy"] = (busy / NS_PER_S, "s")
        figures[f"stream {stream}: idle"] = ((makespan - busy) / NS_PER_S, "s")
    for stage in dict.fromkeys(span.stage for span in found.spans):
        own = [span for span in found.spans if span.stage == stage]
        mean = sum(span.end_ns - span.start_ns for span in own) / len(own)
        figures[f"stage {stage}: launches"] = (len(own), "")
        figures[f"stage {stage}: mean"] = (mean / NS_PER_S, "s")
        figures[f"stage {stage}: bytes"] = (sum(span.bytes for span in own), "B")
    return figures


def result_figures(content: Mapping[str, Any]) -> Figures:
    """Numbers of a result, stages by mean time per launch."""
    figures: Figures = {}
    for name, value in content.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            figures[name] = (float(value), _unit(name))
    for stage, sums in content.get("stages", {}).items():
        if sums.get("count"):
            figures[f"stage {stage}: launches"] = (float(sums["count"]), "")
            figures[f"stage {stage}: mean"] = (sums["busy_s"] / sums["count"], "s")
    # A rate over no time is none.
    if not figures.get("block_time_s", (0.0, ""))[0]:
        figures.pop("throughput_tok_s", None)
    return figures


def report_figures(*contents: Mapping[str, Any]) -> list[Figures]:
    """Measured and predicted throughput of every point of each report, and the ratio of the two."""
    found = []
    for throughputs in _throughputs(*contents):
        figures: Figures = {}
        for name, values in throughputs.items():
            figures[f"{name}: measured"] = (values["measured"], "tok/s")
            figures[f"{name}: predicted"] = (values["predicted"], "tok/s")
            figures[f"{name}: predicted / measured"] = (values["predicted"] / values["measured"], "")
        found.append(figures)
    return found


def agreement(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Whether two runs of the whole procedure agree: on how many points their errors' intervals allow it."""
    ours, theirs = _throughputs(first, second)
    judged = {
        name: (found, theirs[name])
        for name, found in ours.items()
        if name in theirs and "uncertainty" in found and "uncertainty" in theirs[name]
    }
    if not judged:
        return "whether the two agree cannot be said: no point of both has a spread between runs"
    apart = {}
    for name, (one, other) in judged.items():
        difference = math.log(other["predicted"] / other["measured"] / (one["predicted"] / one["measured"]))
        allowed = math.hypot(one["uncertainty"], other["uncertainty"])
        if abs(difference) > allowed:
            apart[name] = f"{name} by {difference:+.1%} (stated: {allowed:.1%})"
    inside = len(judged) - len(apart)
    return f"errors agree within the stated spread on {inside} of {len(judged)} points" + (
        f"; apart: {', '.join(apart.values())}" if apart else ""
    )


def _throughputs(*contents: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Comparison of throughput by point, of each report; a name means one configuration in all of them."""
    points = [[_point(row) for row in content["points"]] for content in contents]
    called = iter(names([point for own in points for point in own]))
    found = []
    for content in contents:
        rates = {next(called): row["figures"].get("throughput_tok_s") for row in content["points"]}
        found.append({name: rate for name, rate in rates.items() if rate is not None})
    return found


def _point(row: Mapping[str, Any]) -> Point:
    """The point of a row of a report; what older reports leave open has its default."""
    given = {field.name: row[field.name] for field in fields(Point) if field.name in row}
    try:
        return Point(**{**given, "conditions": tuple((name, value) for name, value in row.get("conditions", ()))})
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"a report holds a point that is none ({problem}); reconcile --out writes reports") from None


def _unit(name: str) -> str:
    for suffix, unit in (("_tok_s", "tok/s"), ("_s", "s"), ("_bytes", "B"), ("bytes_per_request", "B")):
        if name.endswith(suffix):
            return unit
    return ""


def _underived(path: Path, figures: Figures) -> Iterable[str]:
    if "throughput_tok_s" not in figures:
        yield f"{path}: no throughput, its makespan is 0 or it has fewer than two blocks"


def profile_figures(profile: Profile) -> Figures:
    """Numbers of machine and engine; of a curve each point, at its place."""
    figures: Figures = {}
    for path, _, quantity in profile.quantities():
        short = path.replace(f"engines.{profile.engine.name}", "engine")
        if isinstance(quantity, Number):
            figures[short] = (quantity.value, quantity.unit)
        elif isinstance(quantity, Curve):
            for x, y in zip(quantity.x, quantity.y, strict=True):
                figures[f"{short} at {x:g} {quantity.x_unit}"] = (y, quantity.unit)
    return figures


def _provenance_changes(first: Profile, second: Profile) -> Iterable[str]:
    def provenances(profile: Profile) -> dict[str, str]:
        named: Iterable[tuple[str, Quantity | None]] = ((path, q) for path, _, q in profile.quantities())
        return {path: str(quantity.origin.provenance) for path, quantity in named if quantity is not None}

    theirs = provenances(second)
    for path, kind in provenances(first).items():
        if path in theirs and theirs[path] != kind:
            yield f"{path}: {kind} there, {theirs[path]} here"


def _compare(kind: str, first: Figures, second: Figures, notes: tuple[str, ...]) -> Comparison:
    shared = [name for name in first if name in second]
    differences = tuple(Difference(name, first[name][1], first[name][0], second[name][0]) for name in shared)
    return Comparison(
        kind,
        differences,
        tuple(name for name in first if name not in second),
        tuple(name for name in second if name not in first),
        notes,
    )
