"""Files of runs, profiles and reconciliations -> tables that charts draw. No chart reads a file itself."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline import capacity, trace
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Curve, Profile
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import build
from herald_pipeline.trace import Trace
from herald_pipeline.units import GB
from herald_sim.ceilings import ceilings
from reports.files import read_object

MAX_SPANS = 4000
"""More rows than a chart may hold are a fault of the caller: the window is to be chosen, not cut."""
_MS = 1e6


def read_reconcile(folder: Path) -> dict[str, Any]:
    """The document that ``calibration reconcile`` left in ``folder``."""
    path = folder / "reconcile.json"
    how = f"make it: python -m calibration reconcile --out {folder}"
    return read_object(path, how, ("hardware", "model", "points", "summary"))


def _name(point: dict[str, Any]) -> str:
    """What reconcile's own table calls a point; reports of before it said so have no two of one name."""
    return str(point.get("name", f"{point['method']} {point['context']} x {point['batch']}"))


def throughputs(document: dict[str, Any]) -> pd.DataFrame:
    """One row a point: measured and predicted throughput, both errors, spread, drift."""
    rows = []
    for point in document["points"]:
        figure = point["figures"].get("throughput_tok_s")
        if figure is None:
            continue
        rows.append(
            {
                "point": _name(point),
                "method": point["method"],
                "set": "not judged" if point.get("refused") else point["set"],
                "context": point["context"],
                "batch": point["batch"],
                "measured": figure["measured"],
                "predicted": figure["predicted"],
                "error": figure["error"],
                "spread": figure.get("spread", 0.0),
                "uncertainty": figure.get("uncertainty"),
                "drift": point.get("drift", 1.0),
                "refused": point.get("refused", ""),
                "runs": figure["runs"],
            }
        )
    return pd.DataFrame(rows)


def stage_errors(document: dict[str, Any]) -> pd.DataFrame:
    """One row a stage kind and held-out point: times per launch and the signed error."""
    rows = [
        {
            "stage": stage,
            "point": _name(point),
            "method": point["method"],
            "measured_ms": figure["measured"] * 1e3,
            "predicted_ms": figure["predicted"] * 1e3,
            "error": figure["error"],
            "share": figure.get("share", 0.0),
        }
        for point in document["points"]
        if point["set"] == "held-out" and not point.get("refused")
        for stage, figure in point["stages"].items()
    ]
    return pd.DataFrame(rows)


def timeline(paths: Iterable[Path], first_block: int = 1) -> pd.DataFrame:
    """:func:`block_spans` of traces of different sources, refused where a chart could not hold it."""
    found = {str(path): trace.read_chrome(path) for path in paths}
    frame = block_spans(found, first_block)
    frame["source"] = frame["source"].map({path: one.source for path, one in found.items()})
    if len(frame) > MAX_SPANS:
        raise ConfigError(f"{len(frame)} spans are more than a timeline shows ({MAX_SPANS}); choose a smaller model")
    return frame


def block_spans(runs: Mapping[str, Trace], block: int) -> pd.DataFrame:
    """Spans of one block of one run or several, in milliseconds since that block began.

    It begins where ``main`` has ended what came before, for a step 0 may stand on another stream. A selection pass that
    serves the next block lies beside the block in which it runs, so spans are chosen by time.
    ``source`` is the run's name in ``runs``.
    """
    frames = []
    for name, found in runs.items():
        main = [span for span in found.spans if span.stream == "main" and span.block == block]
        if not main:
            raise ConfigError(f"{name} holds no block {block}; run more blocks, or ask for an earlier one")
        first, end = min(s.start_ns for s in main), max(s.end_ns for s in main)
        before = [s.end_ns for s in found.spans if s.stream == "main" and s.end_ns <= first]
        start = max(before, default=first)
        rows = [
            {
                "source": name,
                "stream": span.stream,
                "stage": span.stage,
                "start_ms": max(0, span.start_ns - start) / _MS,
                "end_ms": (min(span.end_ns, end) - start) / _MS,
                "duration_ms": (span.end_ns - span.start_ns) / _MS,
                "layer": "all" if span.layer is None else str(span.layer),
                "step": span.step,
                "block": span.block,
            }
            for span in found.spans
            if span.end_ns > start and span.start_ns < end and span.block >= 0
        ]
        frames.append(pd.DataFrame(rows))
    return pd.concat(frames, ignore_index=True)


def stage_times(found: Trace) -> pd.DataFrame:
    """One row a stage of decoding, in order of first launch: how often a block, how long, share of the time, rate.

    All blocks but the first are counted where there are more. The time that ``share`` divides by is that from the first
    of these launches on ``main`` to the last one's end there; ``gb_s`` is empty where no bytes were counted, and for
    forwards, whose bytes the two interpreters count differently (with and without weights).
    """
    spans = found.to_frame()
    spans = spans[spans["block"] >= min(1, spans["block"].max())]
    spans = spans.assign(duration_ns=spans["end_ns"] - spans["start_ns"])
    main = spans[spans["stream"] == "main"]
    window_ns = main["end_ns"].max() - main["start_ns"].min()
    frame: pd.DataFrame = (
        spans.groupby(["stage", "stream", "resource"], sort=False)
        .agg(
            launches=("launch", "size"),
            median_ns=("duration_ns", "median"),
            longest_ns=("duration_ns", "max"),
            busy_ns=("duration_ns", "sum"),
            bytes=("bytes", "sum"),
            blocks=("block", "nunique"),
        )
        .reset_index()
    )
    frame["per_block"] = frame["launches"] / frame["blocks"]
    frame["share"] = frame["busy_ns"] / window_ns
    frame["gb_s"] = (frame["bytes"] / frame["busy_ns"]).where(
        (frame["bytes"] > 0) & (frame["busy_ns"] > 0) & (frame["resource"] != "gpu")
    )
    return frame


def ceiling_rows(shape: ModelShape, profile: Profile, context: int, steps: int, batch: int) -> pd.DataFrame:
    """Ceilings of the machine by scheme; ``binding`` marks what the scheme cannot pass."""
    rows = ceilings(shape, profile, context, steps=steps, batch=batch)
    return pd.DataFrame(
        [
            {
                "scheme": row["scheme"],
                "ceiling": row["name"],
                "resource": row["resource"],
                "tok_s": row["value_tok_s"],
                "binding": row["binding"],
                "formula": row["formula"],
                "provenance": ", ".join(sorted(set(row["provenance"].values()))),
            }
            for row in rows
        ]
    )


def memory_rows(
    shape: ModelShape, profile: Profile, methods: Iterable[str], tokens: int, batch: int, kv_dtype: str
) -> pd.DataFrame:
    """Every item of each method's memory budget, in GB, with its home."""
    memory = Memory.of(profile)
    rows = []
    for method in methods:
        pipeline = build(shape, method, kv_dtype=kv_dtype, dram_kv_dtype=kv_dtype)
        for item in capacity.budget(pipeline, tokens, batch, memory).items:
            home = "device" if item.home.value == "hbm" else "host"
            rows.append(
                {
                    "method": method,
                    "home": home,
                    "item": item.name,
                    "gb": item.num_bytes / GB,
                    "what": item.what,
                    "stays": "comes and goes" if item.transient else "stays",
                }
            )
    return pd.DataFrame(rows)


def profile_rows(profile: Profile) -> pd.DataFrame:
    """Every number of a profile: value or range, unit, where it comes from, spread."""
    rows = []
    for path, _, quantity in profile.quantities():
        if quantity is None:
            continue
        origin = quantity.origin
        if isinstance(quantity, Curve):
            low, high = min(quantity.y), max(quantity.y)
            value = f"{low:.4g} to {high:.4g} over {quantity.x[0]:g} to {quantity.x[-1]:g} {quantity.x_unit}"
        else:
            value = f"{quantity.value:.5g}"
        rows.append(
            {
                "number": path,
                "value": value,
                "unit": quantity.unit,
                "provenance": str(origin.provenance),
                "spread": "" if origin.spread is None else f"{origin.spread:.1%}",
                "from": origin.source or origin.pinned_by or origin.note or origin.command,
            }
        )
    return pd.DataFrame(rows)
