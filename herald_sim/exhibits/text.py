"""Exhibits for people: a caption with the unit, columns in words, footnotes for what had to be assumed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from herald_sim.text import number, table_rows, wrapped

Row = Mapping[str, Any]


class Caption(NamedTuple):
    """What an exhibit shows, in which unit, and what a reader must know to use it."""

    title: str
    notes: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    """Columns that are said once above the rows that share them."""


_BEST = "ours at our own best feasible batch: the figure prints none"
CAPTIONS: Mapping[str, Caption] = {
    "table-2": Caption(
        "Table II: peak decode throughput, tok/s, at the paper's batch",
        (
            "best, largest: the batch with our highest throughput, and the largest that our memory rule allows; error "
            "is that of the largest batch",
            "the batches of InfiniGen, MAGE-Offload and SDAR's HERALD are smaller than memory asks for: not explained",
        ),
    ),
    "fig-4": Caption(
        "Fig. 4: Dense decode throughput, tok/s, by batch at 32K",
        ("fits, no: beyond the device's memory, simulated as if it did not end", "endless: fixed costs vanish"),
    ),
    "fig-5": Caption(
        "Fig. 5: what each resource alone allows, tok/s",
        ("(o) binds: the schemes whose lowest ceiling it is; `herald-sim ceilings` has all of them by scheme",),
    ),
    "fig-8": Caption("Fig. 8: selection kernel, throughput with one query over that with all 32, a ratio"),
    "fig-12": Caption(
        "Fig. 12: decode throughput, tok/s, by batch at 32K",
        ("projected: beyond the device's memory", "ideal: sparse forwards alone, selection and transfers free"),
    ),
    "fig-13": Caption(
        "Fig. 13: the ablation, decode throughput in tok/s",
        (
            _BEST,
            "times: over mage-offload's bar of the same context; herald-32q completes the 2 x 2 and is not printed",
        ),
    ),
    "fig-14": Caption(
        "Fig. 14: Dense and HERALD over the denoising steps T, tok/s, and a block's latencies in seconds",
        (
            "ours: HERALD's throughput over Dense's, a ratio; printed 1: the text says that HERALD matches Dense",
            "main: forwards of a block; retrieval: a pass from its first launch to its last; they overlap",
            "T*: the first T of this table at which HERALD is above Dense",
        ),
    ),
    "budget-cost": Caption(
        "Section IV-A: throughput lost by a budget 1.75 times as large, %",
        (
            "ours: the sparse forward alone, each budget at its largest feasible batch",
            "held out, and far from the printed loss: the paper does not say which batches it compares. With the batch "
            "cut 1.75 times as well, 80 requests to 46 at 32K lose 15%, 140 to 80 lose 9%",
        ),
    ),
    "fit": Caption(
        "Errors of the fits: values that a fit saw, and values that it did not",
        (
            "all: the fit whose numbers the profile holds; leave-one-out: each value predicted by a fit of the others",
            "llada2-mini-only and 32k-only: the other model's and the other context's values are predicted",
        ),
    ),
    "identified": Caption(
        "How far the printed values decide each fitted number",
        (
            "spread: relative standard deviation; moved: largest change when one value is left out",
            "decided: both within 10%; of the others only what they predict together means something",
        ),
    ),
    "dsb-main": Caption(
        "DSB, main table, taken apart: tok/s as printed, milliseconds and forwards implied by it",
        by=("model", "decoder"),
    ),
    "dsb-table-3": Caption(
        "DSB, Table 3, taken apart: tok/s as printed, milliseconds and forwards implied by it", by=("model", "decoder")
    ),
    "dsb-example": Caption("DSB, worked example: where a block begins and ends, in positions"),
}
_HEADINGS = {
    "published": "printed",
    "value": "ours",
    "our_peak_batch": "best",
    "our_largest_batch": "largest",
    "batch_error": "error of batch",
    "limit": "limited by",
    "normalised": "times",
    "main_latency_s": "main s",
    "retrieval_latency_s": "retrieval s",
    "first_T_above_dense": "T*",
    "dense_tok_s": "Dense",
    "herald_tok_s": "HERALD",
    "full_forward_ms": "full ms",
    "short_step_ms": "short ms",
    "identified": "decided",
}
_SHARES = frozenset({"error", "batch_error", "spread", "moved"})
_IN_WORDS = {"True": "yes", "False": "no"}


def exhibit_text(name: str, rows: Sequence[Row]) -> str:
    """The exhibit called ``name``: caption, table, footnotes, and errors of each fit and set."""
    caption = CAPTIONS[name]
    notes: dict[str, str] = {}
    columns = [column for column in _columns(rows) if column not in caption.by]
    cells = [_row(row, columns, notes) for row in rows]
    header = [_HEADINGS.get(column, column) for column in columns]
    heading, *texts = table_rows(header, cells, indent=2 if caption.by else 0)
    lines = [caption.title, "", heading]
    group = None
    for row, text in zip(rows, texts, strict=True):
        shared = ", ".join(str(row[column]) for column in caption.by)
        lines += [shared] if shared and shared != group else []
        group = shared
        lines.append(text)
    lines.append("")
    lines += [wrapped(f"[{mark}] {note}", hang=4) for note, mark in notes.items()]
    lines += [wrapped(note, hang=2) for note in caption.notes]
    lines += list(_errors(rows))
    return "\n".join(lines).rstrip()


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns that say something: no name where its parts stand beside it, nothing that is empty all the way."""
    found = list(dict.fromkeys(key for row in rows for key in row))
    parts = all(row.get("method") for row in rows)
    hidden = {"exhibit", "assumption", "unit", "basis", "note", *(("name",) if parts else ())}
    hidden |= {key for key in found if all(row.get(key) in (None, "") for row in rows)}
    # The lines of errors name the set; a column that says the same in every row is only wide.
    hidden |= {"set"} if len({row.get("set") for row in rows if row.get("published") is not None}) == 1 else set()
    return [key for key in found if key not in hidden]


def _row(row: Row, columns: Sequence[str], notes: dict[str, str]) -> list[str]:
    cells = [_cell(column, row) for column in columns]
    for text in (row.get("assumption"), row.get("note"), row.get("basis")):
        if text:
            mark = notes.setdefault(str(text), str(len(notes) + 1))
            cells[0] += f" [{mark}]"
    return cells


def _cell(column: str, row: Row) -> str:
    value = row.get(column)
    if column == "set" and row.get("published") is None:
        return ""
    if column == "batch" and value is None:
        return "endless" if row.get("method") == "dense" else ""
    if value is None:
        return ""
    if column in _SHARES:
        return f"{100 * value:+.1f}%"
    if isinstance(value, bool):
        return _IN_WORDS[str(value)]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if column == "without":
        return str(value).replace("_", " ")  # a name without spaces cannot be broken into lines
    if not isinstance(value, int | float):
        return str(value)
    text = str(value) if isinstance(value, int) else number(value)
    return f"(o) {text}" if column == "value" and row.get("binds") else text


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    """Mean and worst error of each fit's sets, the values of equal kind together."""
    kinds = dict.fromkeys((row.get("fit"), row.get("set")) for row in rows)
    for fit, kind in kinds:
        errors = [
            abs(row["error"])
            for row in rows
            if (row.get("fit"), row.get("set")) == (fit, kind) and row.get("error") is not None
        ]
        if errors:
            mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
            whose = f"{fit}, {kind}" if fit else kind
            yield f"{whose}: {len(errors)} printed value(s), error {mean:.1f}% in the mean, {worst:.1f}% at worst"
