"""The trace: what ran when, on which stream and resource, with its bytes and FLOPs.

One schema for simulated and real runs; they differ in ``source`` only. :func:`write_chrome` exports JSON (microseconds)
that Perfetto and chrome://tracing open, one lane a stream. Spans on a lane never overlap (:func:`validate`).
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from herald_pipeline.errors import ConfigError, RunError, read_failure
from herald_pipeline.outputs import check_ending

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "herald-trace-1"


class Span(NamedTuple):
    """One launch. Times are integer nanoseconds since the run's start.

    ``bytes`` and ``flops`` are what the interpreter counted; ``expected_bytes`` and ``expected_flops`` are the
    description's demand. ``queued_ns`` is when the launch was issued to its stream.
    """

    stage: str
    stream: str
    resource: str
    block: int
    step: int
    layer: int | None
    rows: int
    start_ns: int
    end_ns: int
    queued_ns: int
    bytes: float
    flops: float
    expected_bytes: float
    expected_flops: float
    launch: int
    after: tuple[int, ...]


class Counter(NamedTuple):
    """A value over time: pool bytes in use, queue length."""

    name: str
    at_ns: int
    value: float


@dataclass(slots=True)
class Trace:
    """Spans, counters and facts of one run. ``source`` is ``simulated`` or ``measured``."""

    source: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)

    def to_frame(self) -> "pd.DataFrame":
        """Spans as a table, one row a launch."""
        import pandas as pd  # heavy: only where a table is wanted

        frame = pd.DataFrame(self.spans, columns=list(Span._fields))
        frame.insert(0, "source", self.source)
        return frame


def validate(trace: Trace) -> None:
    """Check that spans of a stream follow one another and that no launch began before one that it waits for.

    Raises
    ------
    RunError
        With both spans of the first pair that break the rule.
    """
    lanes: dict[str, list[Span]] = {}
    by_launch = {span.launch: span for span in trace.spans}
    for span in trace.spans:
        if span.end_ns < span.start_ns:
            raise RunError(f"span ends before it starts: {_name(span)}")
        lanes.setdefault(span.stream, []).append(span)
        for number in span.after:
            source = by_launch.get(number)
            if source is not None and source.end_ns > span.start_ns:
                raise RunError(
                    f"launch started before one that it waits for had ended: {_name(source)}, then {_name(span)}"
                )
    for spans in lanes.values():
        spans.sort(key=lambda span: (span.start_ns, span.end_ns))
        for earlier, later in pairwise(spans):
            if later.start_ns < earlier.end_ns:
                raise RunError(f"spans of stream {later.stream!r} overlap: {_name(earlier)} and {_name(later)}")


def _name(span: Span) -> str:
    layer = "" if span.layer is None else f" layer {span.layer}"
    return f"{span.stage} block {span.block}{layer} [{span.start_ns}, {span.end_ns}) ns on {span.stream}"


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a Chrome-trace document: ``X`` spans, ``M`` lane names, ``s``/``f`` flows, ``C`` counters."""
    validate(trace)
    streams = list(dict.fromkeys(span.stream for span in trace.spans))
    lanes = {name: index + 1 for index, name in enumerate(streams)}
    process = f"herald {trace.source}"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": process}}]
    for name, tid in lanes.items():
        names = {"name": name}
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": names})
        order = {"sort_index": tid}
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": order})
    by_launch = {span.launch: span for span in trace.spans}
    for span in trace.spans:
        events.append(_chrome_span(span, lanes[span.stream]))
        for number in span.after:
            source = by_launch.get(number)
            if source is not None:
                events += _chrome_flow(source, span, lanes)
    events += [
        {"ph": "C", "pid": 1, "name": c.name, "ts": c.at_ns / 1000, "args": {"value": c.value}} for c in trace.counters
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schema": SCHEMA, "source": trace.source, **trace.facts},
    }


def _chrome_span(span: Span, tid: int) -> dict[str, Any]:
    layer = "" if span.layer is None else f"[{span.layer}]"
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": f"{span.stage}{layer}",
        "cat": span.resource,
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {name: value for name, value in span._asdict().items() if value is not None},
    }


def _chrome_flow(source: Span, target: Span, lanes: Mapping[str, int]) -> list[dict[str, Any]]:
    common = {"pid": 1, "name": "waits", "cat": "edge", "id": f"{source.launch}-{target.launch}"}
    return [
        {"ph": "s", "tid": lanes[source.stream], "ts": source.end_ns / 1000, **common},
        {"ph": "f", "bp": "e", "tid": lanes[target.stream], "ts": target.start_ns / 1000, **common},
    ]


def write_chrome(trace: Trace, path: Path) -> None:
    """Write the Chrome trace; ``.gz`` is compressed. Nothing is written when the trace is not valid."""
    text = json.dumps(to_chrome(trace), separators=(",", ":"))
    data = text.encode()
    check_writable(path, "trace")
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as problem:
        message = f"cannot write the trace to {path}: {problem.strerror}"
        raise RunError(message) from None


def check_trace_file(path: Path, option: str = "--trace-out") -> None:
    """Refuse a name that is none for a Chrome trace, or a place where no file can be, before the run."""
    check_ending(path, (".json", ".json.gz"), "a Chrome trace", option)
    check_writable(path, "trace")


def check_writable(path: Path, what: str) -> None:
    """Refuse a place where no file can be, before the work whose result goes there."""
    if path.is_dir():
        raise ConfigError(f"cannot write the {what} to {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write the {what} to {path}: there is no folder {path.parent}")


def read_chrome(path: Path) -> Trace:
    """Read back what :func:`write_chrome` wrote."""
    try:
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        other = dict(document["otherData"])
        events: Iterable[dict[str, Any]] = document["traceEvents"]
        if other.pop("schema") != SCHEMA:
            raise KeyError("schema")
    except (ValueError, KeyError, TypeError, OSError) as problem:
        raise RunError(f"{path} is not a {SCHEMA} file ({read_failure(problem)}); write one with --trace-out") from None
    trace = Trace(other.pop("source"), other)
    for event in events:
        if event["ph"] == "X":
            args = {"layer": None, **event["args"]}
            args["after"] = tuple(args["after"])
            trace.spans.append(Span(**args))
        elif event["ph"] == "C":
            at_ns = round(event["ts"] * 1000)
            trace.counters.append(Counter(event["name"], at_ns, event["args"]["value"]))
    return trace
