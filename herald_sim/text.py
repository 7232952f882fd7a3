"""Results for people, as plain text."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from herald_pipeline.result import Result
from herald_pipeline.units import NS_PER_S, format_bytes, format_ns

if TYPE_CHECKING:
    from herald_sim.explain import Explanation
    from herald_sim.planning import Peak

WIDTH = 100
"""Columns of a terminal that people can be expected to have; a narrower one is asked for its own."""
_LEAST_WIDTH = 40


_GAP = "  "


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is left-aligned, so are those that hold words.

    Where that is more than the terminal has, cells and headings of several words go on below themselves.
    """
    return "\n".join(table_rows(header, rows))


def table_rows(header: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """The parts of :func:`table`, heading first: a text for each row, of several lines where a cell goes on."""
    lines = [list(header), *[list(row) for row in rows]]
    words = [any(cell and not _numeric(cell) for cell in column) for column in zip(*lines[1:], strict=True)] or [True]
    widths = _widths(lines, _columns() - indent)
    return [textwrap.indent(_row(line, widths, words), " " * indent) for line in lines]


def _row(line: Sequence[str], widths: Sequence[int], words: Sequence[bool]) -> str:
    parts = [_folded(cell, width) for cell, width in zip(line, widths, strict=True)]
    texts = []
    for cells in zip_longest(*parts, fillvalue=""):
        sides = zip(cells, widths, words, strict=False)
        placed = [cell.ljust(width) if word else cell.rjust(width) for cell, width, word in sides]
        texts.append(_GAP.join(placed).rstrip())
    return "\n".join(texts)


def _widths(lines: Sequence[Sequence[str]], available: int) -> list[int]:
    """Widths of the columns: of their widest cell, or less, down to their longest word, until a line fits."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > available:
        room = [width - shortest for width, shortest in zip(widths, least, strict=True)]
        if max(room) <= 0:
            break
        widths[room.index(max(room))] -= 1
    return widths


def _folded(cell: str, width: int) -> list[str]:
    """``cell`` in lines of ``width``; one that fits stays as it is."""
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def wrapped(line: str, hang: int = 12) -> str:
    """``line`` in lines of at most 100 columns (or the terminal's), all but the first indented by ``hang``."""
    return textwrap.fill(line, _columns(), subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


def _columns() -> int:
    """Columns to print in: the terminal's, up to 100; what is piped or written to a file has 100."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(_LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def _numeric(cell: str) -> bool:
    try:
        float(cell.rstrip("%x").replace(",", ""))
    except ValueError:
        return False
    return True


def number(value: float) -> str:
    """Four significant digits without an exponent."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_ns(value * NS_PER_S)


def _verdict(result: Result) -> str:
    """The status; where it says that curves were left, what binds as well."""
    binds = result.limit is not None and result.status == "EXTRAPOLATED"
    return f"{result.status}, BOUND BY {result.limit}" if binds else result.status


def result_text(result: Result) -> str:
    """A result: the figure, where a block's time goes, memory, and what it rests on."""
    about = result.extra
    rate = "-" if result.throughput_tok_s is None else f"{number(result.throughput_tok_s)} tok/s"
    lines = [
        f"{about.get('model')} with {about.get('method')} on {about.get('hardware')} ({about.get('engine')}), "
        f"batch {result.batch}, budget {result.budget:g}",
        f"  throughput      {rate}   {_verdict(result)}",
        f"  block           {_seconds(result.block_time_s)}  (first block {_seconds(result.first_block_time_s)})",
        f"  main stream     {_seconds(result.main_time_s)} of forwards, waits {_seconds(result.stall_s)}, "
        f"{_seconds(result.exposed_transfer_s)} of it for transfers alone",
    ]
    if result.idle_s is not None:
        lines.append(f"  idle            {_seconds(result.idle_s)} without a request, part of the throughput's time")
    if result.retrieval_time_s:
        lines.append(f"  retrieval       {_seconds(result.retrieval_time_s)} a pass, from its first launch to its last")
    if result.forwards_per_block is not None and result.tokens_per_forward is not None:
        forwards, tokens = result.forwards_per_block, result.tokens_per_forward
        lines.append(f"  forwards        {forwards:.2f} a row's block, {tokens:.2f} tokens each")
    if result.kv_bytes_per_request is not None:
        lines.append(
            f"  memory          {format_bytes(result.hbm_bytes or 0)} on the device, "
            f"{format_bytes(result.dram_bytes or 0)} in host memory, "
            f"{format_bytes(result.kv_bytes_per_request)} of KV "
            + ("of the longest request" if "dram_bytes_reserved" in about else "per request")
        )
    if "dram_bytes_reserved" in about:
        lines.append(
            f"  reserved        {format_bytes(about['hbm_bytes_reserved'])} on the device, "
            f"{format_bytes(about['dram_bytes_reserved'])} in host memory, where every slot has room for the longest "
            "request as herald-exec lays them out; above is the peak of the requests' own lengths"
        )
    if result.prefill_tok_s is not None:
        left = about.get("prefill_extrapolated")
        outside = f", outside what was measured: {', '.join(left)}" if left else ""
        lines.append(
            f"  prefill         {_seconds(result.prefill_time_s)}, {number(result.prefill_tok_s)} tok/s{outside}"
        )
    lines.append(f"  requests        {result.finished} finished, {len(result.rejected)} rejected")
    lines += [f"    {reason}" for reason in result.rejected.values()]
    if result.beyond_max_positions:
        lines.append("  beyond the model's maximum positions: speed only, no text would come of it")
    if about.get("extrapolated"):
        lines.append(f"  outside what was measured: {', '.join(about['extrapolated'])}")
    kinds = [f"{len(paths)} {kind}" for kind, paths in result.provenance.items() if kind != "overrides" and paths]
    lines.append(f"  rests on        {', '.join(kinds)} numbers of the profile")
    if result.provenance.get("overrides"):
        lines.append(f"  overridden      {', '.join(result.provenance['overrides'])}")
    if result.interval is not None:
        lines.append(f"  95% interval    {number(result.interval[0])} to {number(result.interval[1])} tok/s")
    if "contention_error" in about:
        lines.append(
            f"  fast mode       without contention; events give {-100 * about['contention_error']:+.2g}% on 6 blocks"
        )
    elif str(about.get("mode", "events")) != "events":
        lines.append(f"  mode            {about['mode']}")
    lines += [f"  assumed         {assumption}" for assumption in result.assumptions]
    return "\n".join(wrapped(line, 18) for line in lines)


def ceilings_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ceilings by scheme; the ring is on the lowest of each."""
    cells: list[tuple[str, str, str]] = []
    scheme = None
    for row in rows:
        if row["scheme"] != scheme:
            cells.append((row["scheme"], "", ""))
            scheme = row["scheme"]
        ring = "(o) " if row["binding"] else "    "
        cells.append(("  " + row["name"], f"{ring}{number(row['value_tok_s'])} tok/s", row["resource"]))
    lines = [table(("ceiling", "value", "resource"), cells), "", "(o) the lowest of its scheme", "", "how"]
    for name, row in {row["name"]: row for row in rows}.items():
        inputs = ", ".join(f"{key} {_value(value)}" for key, value in row["inputs"].items())
        lines += [wrapped(f"  {name} = {row['formula']}", 6), wrapped(f"    with {inputs}", 9)]
    return "\n".join(lines)


def _value(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def explanation_text(found: "Explanation") -> str:
    """Critical path by stage, then the effect of each change."""
    whole = sum(found.path.values())
    path = [(name, _seconds(value), f"{100 * value / whole:.1f}%") for name, value in found.path.items()]
    beyond = found.result.extra.get("beyond_memory")
    projected = f"beyond memory: {beyond}; nothing shows that this batch could be held"
    changes = [(name, f"{100 * value:+.1f}%") for name, value in found.changes.items()]
    return "\n".join(
        [
            f"{number(found.result.throughput_tok_s or 0)} tok/s, block {_seconds(found.result.block_time_s)}, "
            f"{_verdict(found.result)}",
            *([wrapped(projected)] if beyond else []),
            "",
            "critical path of a block",
            table(("stage", "time", "share"), path),
            "",
            "throughput if",
            table(("change", "effect"), changes),
        ]
    )


_REASONS = 5
"""Reasons that a sweep's summary shows; points.jsonl holds all."""


def summary_text(summary: Mapping[str, Any]) -> str:
    """Counts, the best point and the Pareto front of a sweep."""
    counts = ", ".join(f"{summary[state]} {state}" for state in ("ok", "infeasible", "failed"))
    lines = [f"{summary['points']} points: {counts}"]
    if summary["outdated"]:
        lines.append(f"{summary['outdated']} stood there of another profile, model file or mode, and ran again")
    if summary["repeated"]:
        lines.append(f"{summary['repeated']} more were given twice and stand there once")
    if summary["best"] is not None:
        lines.append(f"best {number(summary['best']['throughput_tok_s'])} tok/s: {_parameters(summary['best'])}")
        lines.append("throughput against block time, what no other point beats in both:")
        lines += [
            f"  {number(point['throughput_tok_s'])} tok/s, {_seconds(point['block_time_s'])}: {_parameters(point)}"
            for point in summary["pareto"]
        ]
    reasons = summary["left_out"]
    for entry in reasons[:_REASONS]:
        count = "" if entry["points"] == 1 else f" ({entry['points']} points), the first"
        lines.append(f"{entry['state']}: {entry['reason'].splitlines()[0]}{count}: {_parameters(entry)}")
    if len(reasons) > _REASONS:
        lines.append(f"and {len(reasons) - _REASONS} more reasons in points.jsonl")
    return "\n".join(lines)


def _parameters(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in point["parameters"].items())


def peak_text(peak: "Peak") -> str:
    """The best batch, the largest one, those tried, and the memory budget."""
    tried = table(("batch", "tok/s"), [(str(batch), number(value)) for batch, value in peak.tried])
    return "\n".join(
        [
            f"highest throughput {number(peak.throughput_tok_s)} tok/s at batch {peak.batch}",
            f"largest batch that fits {peak.largest_batch}, limited by {peak.limit}",
            tried,
            peak.budget.table(),
        ]
    )
