"""Files of runs, profiles and reconciliations -> tables that charts draw. No chart reads a file itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline import capacity, trace
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Curve, Profile
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import build
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


def timeline(paths: Iterable[Path], first_block: int = 1, blocks: int = 1) -> pd.DataFrame:
    """Spans of some blocks of one run or several, in milliseconds since the first of these blocks began on ``main``.

    A selection pass that serves the next block lies beside the block in which it runs, so spans are chosen by time.
    """
    frames = []
    for path in paths:
        found = trace.read_chrome(path)
        main = [s for s in found.spans if s.stream == "main" and first_block <= s.block < first_block + blocks]
        if not main:
            raise ConfigError(f"{path} holds no block {first_block}; run more blocks, or ask for an earlier one")
        start, end = min(s.start_ns for s in main), max(s.end_ns for s in main)
        rows = [
            {
                "source": found.source,
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
    frame = pd.concat(frames, ignore_index=True)
    if len(frame) > MAX_SPANS:
        raise ConfigError(f"{len(frame)} spans are more than a timeline shows ({MAX_SPANS}); choose fewer blocks")
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
