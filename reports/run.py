"""The page of one run, real or simulated, or of a few beside one another: figures, one block's timeline, stages.

All of it comes from the traces that ``herald-exec run`` and ``herald-sim run`` write with ``--trace-out``.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline import trace
from herald_pipeline.errors import ConfigError
from herald_pipeline.trace import Trace
from herald_pipeline.units import NS_PER_S, format_ns
from reports import charts, frames
from reports.page import Cell, Section, Table

MOST_RUNS = 4
"""More columns and timelines than that cannot be read beside one another."""


def _seconds(value: float) -> str:
    return format_ns(value * NS_PER_S)


def _number(value: float) -> str:
    """Four significant digits without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "throughput_tok_s": ("throughput (tok/s, warm-up blocks excluded)", _number),
    "block_time_s": ("time of a block", _seconds),
    "main_time_s": ("forwards of a block", _seconds),
    "retrieval_time_s": ("retrieval, a pass", _seconds),
    "stall_s": ("main stream waits, a block", _seconds),
    "forwards_per_block": ("forwards a block", "{:.2f}".format),
    "tokens_per_forward": ("tokens a forward", "{:.2f}".format),
    "prefill_time_s": ("prefill", _seconds),
    "prefill_tok_s": ("prefill (tok/s)", _number),
    "delivered_tokens": ("tokens delivered", "{:,}".format),
    "finished": ("requests finished", "{:,}".format),
    "status": ("status", str),
}


def build(paths: Sequence[Path], block: int | None = None) -> tuple[str, str, list[Section]]:
    """Title, lead and sections of the page.

    Parameters
    ----------
    paths
        Chrome traces as ``--trace-out`` writes them, at most :data:`MOST_RUNS`.
    block
        Block of the timelines; without, the second one, which follows the warm-up, or the only one.

    Raises
    ------
    ConfigError
        Too many traces, or a trace that lacks the block.
    RunError
        A file that is no such trace.
    """
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} traces are more than a page shows beside one another ({MOST_RUNS})")
    found = [trace.read_chrome(path) for path in paths]
    for path, one in zip(paths, found, strict=True):
        if not any(span.block >= 0 for span in one.spans):
            raise ConfigError(f"{path} holds no launch of a block: nothing was decoded in this run")
    runs = dict(zip(_names(paths, found), found, strict=True))
    shown = block if block is not None else min(1, *(_last_block(one) for one in found))
    stages = pd.concat([frames.stage_times(one).assign(run=name) for name, one in runs.items()], ignore_index=True)
    sections = [_figures(runs), _timeline(runs, shown), _stages(stages)]
    title = f"HERALD: {' beside '.join(runs)}"
    return title, " ".join(_lead(name, one) for name, one in runs.items()), sections


def _names(paths: Sequence[Path], traces: Sequence[Trace]) -> list[str]:
    """What tells the runs apart, as short as it can be: source, then method, then the file's name."""
    choices = (
        [one.source for one in traces],
        [f"{one.facts.get('method', 'run')} {one.source}" for one in traces],
        [path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace") for path in paths],
        [str(path) for path in paths],
    )
    for names in choices:
        if max(Counter(names).values()) == 1:
            return names
    raise ConfigError(f"{', '.join(str(path) for path in paths)}: the same trace is given twice")


def _last_block(one: Trace) -> int:
    return max(span.block for span in one.spans)


def _lead(name: str, one: Trace) -> str:
    facts = one.facts
    where = facts.get("device", facts.get("hardware", ""))
    words = f"{name}: {facts.get('model', 'a model')} with {facts.get('method', 'a method')}"
    words += f" on {where}" if where else ""
    result = _result(one)
    if "throughput_tok_s" in result:
        batch = result.get("batch", 1)
        words += f", batch {batch}, {_number(result['throughput_tok_s'])} tok/s"
    return words + "."


def _result(one: Trace) -> Mapping[str, Any]:
    result = one.facts.get("result")
    return result if isinstance(result, Mapping) else {}


def _figures(runs: Mapping[str, Trace]) -> Section:
    results = {name: _result(one) for name, one in runs.items()}
    rows = []
    for key, (title, form) in _FIGURES.items():
        values = [_value(result, key) for result in results.values()]
        if all(value is None for value in values):
            continue
        cells = [Cell("" if value is None else form(value), "number") for value in values]
        rows.append((Cell(title), *cells, *_change(values)))
    notes = _notes({name: [f"assumed: {text}" for text in one.get("assumptions", ())] for name, one in results.items()})
    notes += _notes({name: list(one.get("rejected", {}).values()) for name, one in results.items()})
    for key, whose in (("extrapolated", ""), ("prefill_extrapolated", "prefill is ")):
        outside = {name: list(one.get(key, ())) for name, one in results.items()}
        notes += [
            f"{name}: {whose}outside what was measured: {', '.join(paths)}" for name, paths in outside.items() if paths
        ]
    silent = [name for name, result in results.items() if not result]
    if silent:
        notes.append(
            f"{', '.join(silent)}: this trace states no figures; herald-exec run and herald-sim run write them."
        )
    header = ("figure", *runs, *(["second / first - 1"] if len(runs) == 2 else []))
    return Section("Figures", (), table=Table(header, rows) if rows else None, notes=notes)


def _value(result: Mapping[str, Any], key: str) -> Any:
    """A figure; ``None`` where there is none. A method without retrieval has no time of it, not a time of zero."""
    value = result.get(key)
    return None if key == "retrieval_time_s" and value == 0 else value


def _notes(texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Every text once, with the runs that say it where not all do."""
    found: dict[str, list[str]] = {}
    for name, own in texts.items():
        for text in own:
            found.setdefault(text, []).append(name)
    return [text if len(names) == len(texts) else f"{', '.join(names)}: {text}" for text, names in found.items()]


def _change(values: Sequence[Any]) -> list[Cell]:
    """How the second of two runs differs; empty where that says nothing."""
    if len(values) != 2:
        return []
    first, second = values
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return [Cell(f"{second / first - 1:+.1%}" if numbers and first else "", "number")]


def _timeline(runs: Mapping[str, Trace], block: int) -> Section:
    title = f"Timeline of block {block}"
    frame = frames.block_spans(runs, block)
    if len(frame) > frames.MAX_SPANS:
        words = (
            f"Block {block} has {len(frame):,} launches, more than a chart holds ({frames.MAX_SPANS:,}). Perfetto "
            "(ui.perfetto.dev) and chrome://tracing open the trace itself."
        )
        return Section(title, (words,))
    chart = charts.timeline(frame, title, " above ".join(runs))
    caption = "A stream does one thing at a time; what stands above one another overlaps."
    return Section(title, (), chart, caption)


def _stages(stages: pd.DataFrame) -> Section:
    header = ("stage", "stream", "run", "launches a block", "median", "longest", "of the time", "GB/s")
    order = list(dict.fromkeys(stages["stage"]))
    rows = [
        (
            Cell(row["stage"]),
            Cell(row["stream"]),
            Cell(row["run"]),
            Cell(f"{row['per_block']:.4g}", "number"),
            Cell(format_ns(row["median_ns"]), "number"),
            Cell(format_ns(row["longest_ns"]), "number"),
            Cell(f"{row['share']:.1%}", "number"),
            Cell("" if pd.isna(row["gb_s"]) else _number(row["gb_s"]), "number"),
        )
        for name in order
        for row in stages[stages["stage"] == name].to_dict("records")
    ]
    notes = (
        "Of all blocks but the first, where there are more. Of the time: busy time over the time in which these blocks "
        "ran, so a stream's stages add up to how busy it was. GB/s: bytes that the run counted over busy time, of the "
        "CPU's stages and of copies.",
    )
    return Section("Stages", (), table=Table(header, rows), notes=notes)
