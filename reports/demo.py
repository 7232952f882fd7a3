"""The page of ``make demo``: what this machine was predicted to do, and what it did."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Profile
from herald_pipeline.model import ModelShape
from reports import answers, charts, frames
from reports.page import Cell, Section, Table

_METHODS = ("dense", "herald")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the page is made from.

    Attributes
    ----------
    runs
        Folder that ``calibration reconcile`` filled.
    hardware
        Profile; with the fit where there is one.
    context, batch
        Point of the timelines, the ceilings and the memory table.
    answers
        What the shipped model wrote; without the file the page has no such section.
    """

    runs: Path
    hardware: Path
    shape: ModelShape
    context: int
    batch: int
    answers: Path | None = None


def build(inputs: Inputs) -> tuple[str, str, list[Section]]:
    """Title, lead and sections of the page."""
    document = frames.read_reconcile(inputs.runs)
    profile = hardware_io.resolve(inputs.hardware)
    first = document["points"][0]
    sections = [
        _throughput(document),
        *_timelines(inputs),
        _stages(document),
        _ceilings(inputs, profile, first["steps"]),
        _memory(inputs, profile, first),
        *([] if inputs.answers is None else [answers.section(inputs.answers)]),
        _profile(profile),
    ]
    return f"HERALD on {profile.name}", _lead(document), sections


def _lead(document: dict[str, Any]) -> str:
    held = document["summary"]["held-out"]
    if not held.get("of"):
        if held.get("refused"):
            return "The machine changed its speed between calibrating and running: nothing is judged. Repeat the demo."
        return "No held-out point has a throughput, so nothing is judged."
    stages = document["summary"]["stages"]
    denoise = stages.get("denoise", {})
    words = (
        f"{document['model']} was run for real and simulated on {document['hardware']}: "
        f"throughput lies within 15% on {held['within_bar']} of {held['of']} held-out points "
        f"(median error {held['median_error']:+.1%}, worst {held['worst_error']:+.1%})."
    )
    if denoise:
        words += f" A denoise step, where most time goes, is off by {denoise['median_error']:+.1%} in the median."
    return words


def _provenance(document: dict[str, Any]) -> str:
    fitted = ", ".join(path.rpartition(".")[2] for path in document.get("fitted", ())) or "nothing"
    return f"measured: this machine's runs; predicted: simulated on its measured profile, fitted: {fitted}"


def _throughput(document: dict[str, Any]) -> Section:
    frame = frames.throughputs(document)
    chart = charts.throughput_scatter(frame, "Predicted and measured throughput", _provenance(document))
    header = ("point", "set", "measured tok/s", "spread", "predicted", "error", "interval", "drift")
    rows = [
        (
            Cell(row["point"]),
            Cell(row["set"]),
            Cell(f"{row['measured']:.1f}", "number"),
            Cell(f"{row['spread']:.1%}", "number"),
            Cell(f"{row['predicted']:.1f}", "number"),
            Cell(f"{row['error']:+.1%}", "number") if row["refused"] else _judged(row["error"], 0.15),
            Cell("" if pd.isna(row["uncertainty"]) else f"\u00b1{row['uncertainty']:.1%}", "number"),
            Cell(f"{row['drift']:.2f}", "number"),
        )
        for row in frame.to_dict("records")
    ]
    refused = [f"{row['point']}: {row['refused']}" for row in frame.to_dict("records") if row["refused"]]
    notes = [
        "Error = predicted / measured - 1; its interval (95%) follows from repeated runs and calibrations. Drift = how "
        "much longer a fixed piece of work takes beside the runs than while the profile was measured: by how much this "
        "machine has slowed down meanwhile. Predictions are scaled to it.",
        *refused,
        *document.get("notes", ()),
    ]
    caption = "On the dashed line both agree; the band is plus or minus 15%. Crosses were fitted, circles were not."
    return Section("Throughput", (), chart, caption, Table(header, rows), notes)


def _judged(error: float, bar: float) -> Cell:
    return Cell(f"{error:+.1%}", f"number {'good' if abs(error) <= bar else 'bad'}")


def _timelines(inputs: Inputs) -> list[Section]:
    sections = []
    for method in _METHODS:
        stem = f"{method}_{inputs.context}x{inputs.batch}"
        paths = [inputs.runs / "traces" / f"{stem}.{source}.trace.json.gz" for source in ("measured", "simulated")]
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise ConfigError(
                f"no trace of {method} at {inputs.context} x {inputs.batch}: {', '.join(missing)} is missing; "
                "only runs that calibration reconcile makes itself leave traces (not --measured); --context and "
                "--batch name the point"
            )
        frame = frames.timeline(paths)
        title = f"One block of {method}: {inputs.batch} request(s), {inputs.context} tokens of context"
        chart = charts.timeline(frame, title, "above: measured here; below: simulated on this machine's profile")
        caption = _overlap_words(frame) if method == "herald" else "Dense has one stream: every step reads the full KV."
        sections.append(Section(f"Timeline of {method}", (), chart, caption))
    return sections


def _overlap_words(frame: pd.DataFrame) -> str:
    parts = []
    for source, own in frame.groupby("source"):
        main = own[own["stream"] == "main"]
        busy = float((main["end_ms"] - main["start_ms"]).sum())
        parts.append(f"{source}: main stream busy {busy / float(own['end_ms'].max()):.0%} of the block")
    return "Selection, gather and upload of the next block run beside this block's steps. " + "; ".join(parts) + "."


def _stages(document: dict[str, Any]) -> Section:
    title = "Where prediction and measurement differ"
    frame = frames.stage_errors(document)
    if frame.empty:
        return Section(title, ("No held-out point was judged, so there is no error of a stage to show.",))
    chart = charts.stage_errors(frame, "Signed error by stage kind, held-out points", _provenance(document))
    header = ("stage kind", "points", "measured", "predicted", "median error", "worst", "spread", "of busy time", "why")
    rows = []
    for kind, errors in document["summary"]["stages"].items():
        rows.append(
            (
                Cell(kind),
                Cell(str(errors["of"]), "number"),
                Cell(_milliseconds(errors.get("measured_s")), "number"),
                Cell(_milliseconds(errors.get("predicted_s")), "number"),
                _judged(errors["median_error"], 0.25),
                Cell(f"{errors['worst_error']:+.1%}", "number"),
                Cell(_share(errors.get("spread")), "number"),
                Cell(_share(errors.get("share_of_busy_time")), "number"),
                Cell(errors.get("cause", "")),
            )
        )
    notes = (
        "Median times of a launch, medians over the points. Positive errors: predicted longer than measured. Without a "
        "GPU both streams are threads of one process: short stages are mostly small operations whose code and data "
        "selection has pushed out of the caches, and some launches wait for their core.",
    )
    return Section(title, (), chart, "Dashed: plus or minus 25%.", Table(header, rows), notes)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ceilings(inputs: Inputs, profile: Profile, steps: int) -> Section:
    frame = frames.ceiling_rows(inputs.shape, profile, inputs.context, steps, inputs.batch)
    kinds = ", ".join(sorted(set(", ".join(frame["provenance"]).split(", "))))
    title = f"Ceilings of this machine: {inputs.shape.name}, {inputs.context} tokens, T = {steps}"
    chart = charts.ceilings(frame, title, f"work over raw rates; provenance of the rates: {kinds}")
    notes = () if not profile.machine.gpu.emulated else ("Without a GPU, 'gpu' is one core and 'link' a memory copy.",)
    return Section("Ceilings", (), chart, "The ring marks the lowest ceiling of a scheme.", None, notes)


def _memory(inputs: Inputs, profile: Profile, first: dict[str, Any]) -> Section:
    tokens = inputs.context + first["blocks"] * first["block_length"]
    frame = frames.memory_rows(inputs.shape, profile, _METHODS, tokens, inputs.batch, first["kv_dtype"])
    title = f"Memory at {inputs.batch} request(s) of {tokens} tokens"
    chart = charts.memory(
        frame, title, "computed from the description; the same formula admits requests in both interpreters"
    )
    rows = [
        (
            Cell(row["method"]),
            Cell(row["home"]),
            Cell(row["item"]),
            Cell(f"{row['gb'] * 1000:.2f}", "number"),
            Cell(row["stays"]),
            Cell(row["what"]),
        )
        for row in frame.to_dict("records")
    ]
    header = ("method", "home", "item", "MB", "", "what")
    return Section("Memory", (), chart, "Items by home.", Table(header, rows))


def _profile(profile: Profile) -> Section:
    frame = frames.profile_rows(profile)
    rows = [tuple(Cell(str(cell), "number" if i == 1 else "") for i, cell in enumerate(row)) for row in _tuples(frame)]
    return Section("Every number of the profile", profile.notes, table=Table(tuple(frame.columns), rows))


def _tuples(frame: pd.DataFrame) -> Sequence[tuple[Any, ...]]:
    return list(frame.itertuples(index=False, name=None))
