"""What the stages of the retrieval pass cost beyond their rates, where cores play the GPU.

The pass runs in the executor beside real steps, with a prompt that is next to nothing, for one request and for four.
What a stage then takes longer than the rates measured so far foretell is its fixed cost: bookkeeping, small torch
operations, waiting for the interpreter, which the main stream's thread holds half of the time. Rates are taken off
first, so that nothing is counted twice.

Copies to the host are a loop over requests and layers there: they have no rate of their own, and what one request more
costs *is* their rate.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from calibration import profile_file
from calibration.bench import Bench, Part, Value, row_of
from calibration.points import Point
from calibration.reconcile import predictor
from calibration.runs import Sample, run_point
from calibration.timing import Timing
from herald_exec.models import BlockModel, random_model
from herald_pipeline import hardware_io
from herald_pipeline.hardware import Profile
from herald_pipeline.model import ModelShape
from herald_pipeline.units import GB, NS_PER_S

_RUNS, _RUNS_QUICK = 3, 2
FEW, MANY = 1, 4
"""Requests of the two short runs."""
_STAGES = {"select": "select", "gather": "gather", "h2d": "upload"}
"""Engine number -> stage whose fixed cost it is."""
Medians = Mapping[int, Mapping[str, Timing]]
"""Requests -> stage -> timing of its launches."""


def measure(bench: Bench, part: Part) -> list[Value]:
    """Fixed costs of the pass's stages, and the rate of copies to the host; raw samples go to ``part``."""
    # A small vocabulary: the head is the main stream's, and only makes the run longer.
    shape = replace(bench.shape, vocab_size=256, mask_token_id=255, eos_token_ids=())
    model = random_model(shape, device=bench.device, dtype=bench.dtype)
    points = {rows: _point(bench, rows) for rows in (FEW, MANY)}
    runs = [
        {rows: _timings(bench, model, point) for rows, point in points.items()}
        for _ in range(_RUNS_QUICK if bench.quick else _RUNS)
    ]
    for number, run in enumerate(runs):
        for rows, timings in run.items():
            part.rows += [
                row_of(timing, case=f"stage {name}, run {number}", rows=rows, launches=1)
                for name, timing in timings.items()
            ]
    # What disturbs a run only adds: of each stage's medians the least is the one that can be repeated.
    medians = {
        rows: {
            name: min((run[rows][name] for run in runs), key=lambda timing: timing.seconds) for name in runs[0][rows]
        }
        for rows in points
    }
    predict = predictor(without_overheads(bench), shape)
    expected = {rows: predict(point) for rows, point in points.items()}
    about = points[FEW]
    note = (
        f"{about.method}, {about.context} tokens, {FEW} and {MANY} requests, beside the main stream; "
        f"least of {len(runs)} medians, less what rates foretell"
    )
    return [*fixed_costs(medians, expected, note), *_down(bench, shape, medians, note)]


def fixed_costs(medians: Medians, expected: Mapping[int, Sample], note: str) -> list[Value]:
    """Mean over both numbers of requests of what each stage takes beyond its rates, never below 0."""

    def beyond(*names: str) -> float:
        extra = [
            sum(medians[rows][name].seconds - expected[rows].stages.get(name, 0.0) for name in names)
            for rows in medians
        ]
        return max(0.0, sum(extra) / len(extra))

    def spread(name: str) -> float:
        return round(max(medians[rows][name].spread for rows in medians), 4)

    layer = Value(
        "engine.retrieval_layer_overhead_us",
        "us",
        beyond("project", "finish") * 1e6,
        spread=spread("finish"),
        note=note,
    )
    others = [
        Value(f"engine.{name}_overhead_us", "us", beyond(stage) * 1e6, spread=spread(stage), note=note)
        for name, stage in _STAGES.items()
    ]
    return [layer, *others]


def _down(bench: Bench, shape: ModelShape, medians: Medians, note: str) -> list[Value]:
    """Rate of copies to the host from what a request more costs; what is left of the first one is fixed."""
    few, many = (medians[rows]["append"].seconds for rows in (FEW, MANY))
    size = bench.block_length * shape.kv_bytes_per_token(bench.kv_dtype)
    per_request = down_per_request(few, many)
    spread = round(max(medians[rows]["append"].spread for rows in medians), 4)
    return [
        Value("machine.link.d2h_gb_s", "GB/s", size / per_request / GB, spread=spread, note=f"append; {note}"),
        Value("engine.d2h_overhead_us", "us", max(0.0, few - FEW * per_request) * 1e6, spread=spread, note=note),
    ]


def down_per_request(few_s: float, many_s: float) -> float:
    """Seconds that a request adds; where disturbances hide it, its share of the larger run."""
    slope = (many_s - few_s) / (MANY - FEW)
    return slope if slope > 0 else many_s / MANY


def without_overheads(bench: Bench) -> Profile:
    """The profile of what has been measured so far, with no fixed cost of a retrieval stage."""
    stamp = profile_file.Stamp("calibration measure", "under way", "under way")
    nothing = [
        Value(f"engine.{name}_overhead_us", "us", 0.0, note="not yet measured")
        for name in ("stage", "retrieval_layer", "h2d", "d2h", *(name for name in _STAGES if name != "h2d"))
    ]
    # How many kernels a layer is matters for turns on a GPU only.
    counts = [
        Value(f"engine.{name}", "kernels", 1.0, note="not yet measured")
        for name in ("kernels_per_layer", "retrieval_kernels_per_layer")
    ]
    data = profile_file.merge(bench.base, [*bench.done, Part("launch", [*nothing, *counts])], stamp)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "so-far.toml"
        profile_file.write(path, data, [])
        return hardware_io.resolve(path)


def _point(bench: Bench, rows: int) -> Point:
    return Point(
        "herald-no-draft",
        2 * bench.block_length,
        rows,
        steps=2,
        blocks=6,
        block_length=bench.block_length,
        kv_dtype=str(bench.kv_dtype),
    )


def _timings(bench: Bench, model: BlockModel, point: Point) -> dict[str, Timing]:
    """Durations of every stage's launches in one run of ``point``, the first block left out."""
    run = run_point(point, model, keep_trace=True, threads=len({*bench.main_cores, *bench.retrieval_cores}))
    assert run.trace is not None
    found: dict[str, list[float]] = {}
    for span in run.trace.spans:
        if span.block > 0:
            found.setdefault(span.stage, []).append((span.end_ns - span.start_ns) / NS_PER_S)
    return {name: Timing(name, tuple(samples), 1) for name, samples in found.items()}
