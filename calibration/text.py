"""Reports for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibration import compare
from calibration.fit import Fit
from calibration.points import HELD_OUT
from calibration.report import MAX_DRIFT, STAGE_BAR, THROUGHPUT_BAR, PointReport, Report, judged

_NAMED_NOTES = 3
"""A note of more points than these is printed once, with their number."""
_NAME_WIDTH = 38
"""Characters of a point's name on one line: with the numbers beside it a line of the table stays below 130."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first one left-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    texts = []
    for line in lines:
        first, *others = line
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def percent(value: float | None) -> str:
    """A signed share in percent."""
    return "-" if value is None else f"{value:+.1%}"


def _plain_percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def report_text(report: Report) -> str:
    """Throughput by point, then every stage kind, then what it amounts to."""
    lines = [
        f"{report.model} on {report.hardware}: error = predicted / measured - 1, and the half width of its interval",
        "(95%, from repeated runs and calibrations); spread: between runs; drift: the machine's slow-down since it was",
        "measured, by a reference beside each run, or by the read rate of its pool's memory (/ the rate of the",
        "host's arithmetic, where selections have many queries). Predictions are scaled to the drift, or made with",
        "those rates; unscaled: error without that.",
        "",
        table(
            ("point", "set", "measured tok/s", "spread", "predicted", "error", "", "drift", "unscaled", "runs"),
            (row for name, point in zip(report.names(), report.points, strict=True) for row in _rows(name, point)),
        ),
        "",
    ]
    stages = report.summary["stages"]
    if stages:
        header = (
            "stage kind, held out",
            "points",
            "measured ms",
            "predicted",
            "median",
            "worst",
            "spread",
            "of busy time",
        )
        lines += [table(header, (_stage_row(report, kind) for kind in stages)), ""]
    lines += [f"{kind}: {errors['cause']}" for kind, errors in stages.items()]
    if report.fitted:
        names = ", ".join(path.rpartition(".")[2] for path in report.fitted)
        lines.append(f"fitted: {names}; every other number stands as the profile states it")
    lines += [f"note: {note}" for note in report.notes]
    lines += _point_notes(report)
    lines += _verdicts(report)
    return "\n".join(lines)


def _point_notes(report: Report) -> list[str]:
    """Notes of points; what many of them share stands once."""
    shared: dict[str, list[str]] = {}
    for name, point in zip(report.names(), report.points, strict=True):
        for note in (*point.notes, point.refused):
            if note:
                shared.setdefault(note, []).append(name)
    lines = []
    for note, names in shared.items():
        if len(names) > _NAMED_NOTES:
            lines.append(f"note: {len(names)} of {len(report.points)} points: {note}")
        else:
            lines += [f"note: {name}: {note}" for name in names]
    return lines


def _rows(name: str, point: PointReport) -> Iterable[Sequence[str]]:
    """A point's row, and one for each further line of its name."""
    first, *others = _folded(name)
    row = _throughput_row(first, point)
    yield row
    for line in others:
        yield (line, *[""] * (len(row) - 1))


def _folded(name: str) -> list[str]:
    """A point's name in lines, ended between two conditions, the further ones indented."""
    first, *conditions = name.split(", ")
    lines = [first]
    for condition in conditions:
        if len(f"{lines[-1]}, {condition},") <= _NAME_WIDTH:
            lines[-1] += f", {condition}"
        else:
            lines[-1] += ","
            lines.append(f"  {condition}")
    return lines


def _throughput_row(name: str, point: PointReport) -> Sequence[str]:
    found = point.throughput
    drift = "-" if point.drift is None else f"{point.drift:.2f}"
    drift += "" if point.cpu_drift is None else f" / {point.cpu_drift:.2f}"
    if found is None:
        return (name, point.point.set, "-", "-", "-", "-", "", drift, "-", "0")
    return (
        name,
        "refused" if point.refused else point.point.set,
        f"{found.measured:.1f}",
        _plain_percent(found.spread),
        f"{found.predicted:.1f}",
        percent(found.error),
        "" if found.uncertainty is None else f"+-{found.uncertainty:.1%}",
        drift,
        percent(found.plain_error),
        str(found.runs),
    )


def _stage_row(report: Report, kind: str) -> Sequence[str]:
    errors = report.summary["stages"][kind]
    return (
        kind,
        str(errors["of"]),
        f"{errors['measured_s'] * 1e3:.3g}",
        f"{errors['predicted_s'] * 1e3:.3g}",
        percent(errors["median_error"]),
        percent(errors["worst_error"]),
        _plain_percent(errors.get("spread")),
        _plain_percent(errors.get("share_of_busy_time")),
    )


def _verdicts(report: Report) -> list[str]:
    held = report.summary[HELD_OUT]
    lines = []
    if held["refused"]:
        lines.append(
            f"{held['refused']} of {held['points']} held-out points not judged: the machine changed speed by more than "
            f"{MAX_DRIFT:.0%} between calibrating and running, or during a run; repeat it when less else runs"
        )
    if not held.get("of"):
        why = "was taken at a steady speed" if held["refused"] else "has a throughput"
        return [*lines, f"no held-out point {why}: nothing is judged"]
    lines.append(
        f"throughput within {THROUGHPUT_BAR:.0%} on {held['within_bar']} of {held['of']} held-out points "
        f"(median {percent(held['median_error'])}, mean of sizes {held['mean_absolute_error']:.1%}, "
        f"worst {percent(held['worst_error'])})"
    )
    outside = [kind for kind, good in judged(report).items() if not good and kind != "throughput"]
    inside = [kind for kind, good in judged(report).items() if good and kind != "throughput"]
    if inside:
        lines.append(f"stage kinds within {STAGE_BAR:.0%} in the median: {', '.join(inside)}")
    if outside:
        lines.append(f"stage kinds beyond {STAGE_BAR:.0%}: {', '.join(outside)}")
    small = [kind for kind in report.summary["stages"] if kind not in inside + outside]
    if small:
        lines.append(f"listed, not judged (below 1% of busy time): {', '.join(small)}")
    return lines


def fit_text(found: Fit) -> str:
    """Each parameter with its standard error, the training set, what is left."""
    lines = [
        table(
            ("parameter", "before", "fitted", "standard error", "verdict"),
            (
                (
                    fitted.name,
                    f"{fitted.before:.4g}",
                    f"{fitted.value:.4g}",
                    _plain_percent(fitted.relative_error) if fitted.relative_error < 10 else "> 1000%",
                    "identified" if fitted.identified else f"not identified: {fitted.why}",
                )
                for fitted in found.parameters
            ),
        ),
        f"training set: {', '.join(found.training)}",
        f"residual: {found.residual:.1%} (standard deviation of ln predicted/measured)",
    ]
    lines += [f"correlation of {one} and {other}: {value:+.2f}" for one, other, value in found.correlations]
    return "\n".join(lines)


def comparison_text(comparison: compare.Comparison) -> str:
    """Two files side by side."""
    rows = (
        (d.name, f"{d.first:.5g} {d.unit}".strip(), f"{d.second:.5g} {d.unit}".strip(), percent(d.relative))
        for d in comparison.differences
    )
    lines = [f"two {comparison.kind}s", table(("", "first", "second", "difference"), rows)]
    for name, only in (("first", comparison.only_first), ("second", comparison.only_second)):
        if only:
            lines.append(f"only in the {name}: {', '.join(only)}")
    lines += [f"note: {note}" for note in comparison.notes]
    return "\n".join(lines)


def interventions_text(found: Mapping[str, Any]) -> str:
    """Changes predicted and measured, and whether the binding resource became another one as predicted."""
    rows = []
    for row in found["rows"]:
        measured, bound = ("-", "-") if "missing" in row else (percent(row["measured_delta"]), _arrow(row, "measured"))
        verdict = f"{row['missing']} not run" if "missing" in row else "yes" if row["as_foretold"] else "no"
        rows.append((row["name"], percent(row["predicted_delta"]), measured, _arrow(row, "predicted"), bound, verdict))
    header = ("change", "predicted", "measured", "binding, predicted", "binding, measured", "as predicted")
    lines = [
        f"{found['model']} on {found['profile']}: changes of throughput; predicted {found['written']}, commit "
        f"{found['commit'][:9]}",
        "",
        table(header, rows),
        "",
    ]
    summary = found["summary"]
    if summary["run"]:
        lines.append(
            f"{summary['run']} of {summary['changes']} changes run: they differ by {summary['mean_difference']:.1%} of "
            f"the base in the mean, {summary['worst_difference']:.1%} at most; same direction "
            f"{summary['same_direction']}, binding resource as predicted {summary['binding_as_foretold']}"
        )
    return "\n".join(lines)


def _arrow(row: Mapping[str, Any], side: str) -> str:
    one, other = row[f"{side}_binding"]
    return one if one == other else f"{one} -> {other}"


def transfer_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Printed values, the blind prediction and the fitted profile's, with their errors."""

    def plain(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    header = ("value", "batch", "published", "blind", "error", "fitted", "error")
    lines = [
        (
            row["name"],
            "-" if row["batch"] is None else str(row["batch"]),
            plain(row["published"]),
            plain(row["blind"]),
            percent(row["blind_error"]),
            plain(row["fitted"]),
            percent(row["fitted_error"]),
        )
        for row in rows
    ]
    found = []
    for label in ("blind", "fitted"):
        errors = [abs(row[f"{label}_error"]) for row in rows if row[f"{label}_error"] is not None]
        if errors:
            mean, worst = sum(errors) / len(errors), max(errors)
            found.append(f"{label}: {len(errors)} values, off by {mean:.0%} in the mean, {worst:.0%} at most")
    return "\n".join([table(header, lines), "", *found])


def ceilings_text(found: Mapping[str, Any]) -> str:
    """A line a ceiling: predicted, by protocol, the bound of raw rates, and what its method reached end to end.

    Beneath, the rates beside a protocol with which it was predicted, and why one has no bound.
    """

    def plain(row: Mapping[str, Any], name: str) -> str:
        return f"{row[name]:.1f}" if name in row else "-"

    lines = [
        (
            row["name"] + (f", link {row['link']}" if row["link"] else ""),
            f"{row['context']} x {row['batch']}",
            plain(row, "foretold_tok_s"),
            plain(row, "protocol_tok_s"),
            percent(row.get("foretold_error")),
            plain(row, "bound_tok_s"),
            _who_reached(row),
            plain(row, "achieved_tok_s"),
            f"{row['achieved_over_protocol']:.2f}" if "achieved_over_protocol" in row else "-",
            f"{row['achieved_over_bound']:.2f}" if "achieved_over_bound" in row else "-",
        )
        for row in found["rows"]
    ]
    header = (
        "ceiling", "at", "predicted", "by protocol", "error", "bound", "method", "achieved", "of protocol", "of bound",
    )  # fmt: skip
    notes = dict.fromkeys(note for row in found["rows"] for note in _ceiling_notes(row))
    return "\n".join([table(header, lines), *notes, *(f"ERROR {text}" for text in found["errors"])])


def _who_reached(row: Mapping[str, Any]) -> str:
    if "method" not in row:
        return "not run"
    policy = f", {row['policy']}" if "policy" in row else ""
    return f"{row['method']} x {row['achieved_batch']}{policy}"


def _ceiling_notes(row: Mapping[str, Any]) -> Iterable[str]:
    at = f"{row['name']} {row['context']} x {row['batch']}"
    arithmetic = (
        ("slower_cpu", "the work of many queries at", "many_queries_gb_s", "GB/s")
        if "many_queries_gb_s" in row
        else ("slower_cpu", "the host's arithmetic ran at", "peak_tflop_s", "TFLOP/s")
    )
    rates = (("slower_dram", "its pool read at", "pool_read_gb_s", "GB/s"), arithmetic)
    said = [f"{what} {row[rate]:.1f} {unit}, so that it takes {row[slower]:.2f} times as long as the profile has it"
        for slower, what, rate, unit in rates if slower in row]  # fmt: skip
    if said:
        yield f"{at}: predicted with the rates beside it: {'; '.join(said)}"
    if "no_bound" in row:
        yield f"{at}: {row['no_bound']}"
