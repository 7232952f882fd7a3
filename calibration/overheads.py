"""What the stages of the retrieval pass cost beyond their rates, where cores play the GPU.

The pass runs in the executor beside real steps, with a prompt that is next to nothing, for one request and for four.
What a stage then takes longer than the rates measured so far predict is its fixed cost: bookkeeping and small torch
operations whose code and data the selection before them has pushed out of the caches (a projection has three norms, two
rotations and three copies, and waits for nobody: its time is its thread's CPU time). The simulator shares a core among
what runs on it at once, so a fixed cost also delays its neighbours: the costs are therefore *solved* for, as those with
which the simulated run has the stages' measured times, and not read off one by one.

Copies to the host are a loop over requests and layers there: they have no rate of their own, and what one request more
costs *is* their rate.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibration import profile_file
from calibration.bench import Bench, Part, Value, row_of
from calibration.points import Point
from calibration.reconcile import predictor
from calibration.runs import Sample, run_point
from calibration.timing import Timing
from herald_exec.models import BlockModel, random_model
from herald_pipeline import hardware_io
from herald_pipeline.hardware import Number, Origin, Profile, Provenance
from herald_pipeline.model import ModelShape
from herald_pipeline.units import GB, NS_PER_S

_RUNS, _RUNS_QUICK = 5, 3
FEW, MANY = 1, 4
"""Requests of the two short runs."""
STAGES = ("project", "finish", "select", "gather", "upload")
"""Stages whose fixed cost is solved for."""
_NUMBERS = {"select": "select", "gather": "gather", "upload": "h2d"}
"""Stage -> engine number that is its fixed cost."""
_ROUNDS, _STEP, _CLOSE_S = 40, 0.7, 1e-6
"""Of the solution: most rounds, share of what is missing that a round adds, and when it is near enough."""
_LEAST_SHARE = 1e-3
Costs = Mapping[str, float]
"""Stage -> fixed cost of a launch in seconds."""
Medians = Mapping[int, Mapping[str, Timing]]
"""Requests -> stage -> timing of its launches."""


def measure(bench: Bench, part: Part, stage_s: float) -> list[Value]:
    """Fixed costs of the pass's stages, and the rate of copies to the host; raw samples go to ``part``.

    ``stage_s`` is what a launch that does nothing takes: a stage's own cost is what comes on top.
    """
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
    # As the runs that are predicted: the middle one of several, and of two in the middle the less disturbed.
    medians = {rows: {name: _middle([run[rows][name] for run in runs]) for name in runs[0][rows]} for rows in points}
    about = points[FEW]
    note = (
        f"{about.method}, {about.context} tokens, {FEW} and {MANY} requests, beside the main stream; "
        f"middle of {len(runs)} medians, less what rates predict"
    )
    down = _down(bench, shape, medians, note)
    empty = Value("engine.stage_overhead_us", "us", stage_s * 1e6, note="empty launches")
    profile = without_overheads(bench, [*down, empty])

    def expected(costs: Costs) -> dict[int, Sample]:
        predict = predictor(with_costs(profile, costs), shape, traced=True)
        return {rows: predict(point) for rows, point in points.items()}

    costs = solved(medians, expected)
    return [*fixed_costs(costs, medians, note), *down]


def _middle(timings: Sequence[Timing]) -> Timing:
    """The timing whose median is the middle one."""
    return sorted(timings, key=lambda timing: timing.seconds)[(len(timings) - 1) // 2]


def solved(medians: Medians, expected: Callable[[Costs], Mapping[int, Sample]]) -> dict[str, float]:
    """Fixed costs with which the prediction meets the stages' times, in the mean over both numbers of requests.

    A cost is never below 0: a stage that takes less than its rates predict has none.
    """
    costs = dict.fromkeys(STAGES, 0.0)
    for _ in range(_ROUNDS):
        found = expected(costs)
        missing = {
            name: sum(medians[rows][name].seconds - found[rows].stages.get(name, 0.0) for rows in medians)
            / len(medians)
            for name in STAGES
        }
        new = {name: max(0.0, cost + _STEP * missing[name]) for name, cost in costs.items()}
        change = max(abs(new[name] - cost) for name, cost in costs.items())
        costs = new
        if change < _CLOSE_S:
            break
    return costs


def fixed_costs(costs: Costs, medians: Medians, note: str) -> list[Value]:
    """The costs as numbers of the engine, each with the spread of its stage's launches."""

    def spread(name: str) -> float:
        return round(max(medians[rows][name].spread for rows in medians), 4)

    layer_s, share = _layer_cost(costs)
    return [
        Value("engine.retrieval_layer_overhead_us", "us", layer_s * 1e6, spread=spread("finish"), note=note),
        Value("engine.retrieval_project_share", "share", share, spread=spread("project"), note=note),
        *(
            Value(f"engine.{name}_overhead_us", "us", costs[stage] * 1e6, spread=spread(stage), note=note)
            for stage, name in _NUMBERS.items()
        ),
    ]


def with_costs(profile: Profile, costs: Costs) -> Profile:
    """The profile with these fixed costs of retrieval's stages."""
    layer_s, share = _layer_cost(costs)
    changed: dict[str, Any] = {
        f"{name}_overhead_us": _number(costs[stage] * 1e6, "us") for stage, name in _NUMBERS.items()
    }
    changed["retrieval_layer_overhead_us"] = _number(layer_s * 1e6, "us")
    changed["retrieval_project_share"] = _number(share, "share")
    return replace(profile, engine=replace(profile.engine, **changed))


def _layer_cost(costs: Costs) -> tuple[float, float]:
    """Seconds of a retrieval layer's fixed cost, and the projection's share of it."""
    whole = costs["project"] + costs["finish"]
    return whole, min(1.0, max(_LEAST_SHARE, costs["project"] / whole)) if whole else 0.5


def _number(value: float, unit: str) -> Number:
    return Number(value, unit, Origin(Provenance.MEASURED))


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


def without_overheads(bench: Bench, known: Sequence[Value] = ()) -> Profile:
    """The profile of what has been measured so far and of ``known``, with no fixed cost of a retrieval stage."""
    stamp = profile_file.Stamp("calibration measure", "under way", "under way")
    nothing = [
        Value(f"engine.{name}_overhead_us", "us", 0.0, note="not yet measured")
        for name in ("stage", "retrieval_layer", "select", "gather", "h2d", "d2h")
    ]
    # How many kernels a layer is matters for turns on a GPU only.
    counts = [
        Value(f"engine.{name}", "kernels", 1.0, note="not yet measured")
        for name in ("kernels_per_layer", "retrieval_kernels_per_layer")
    ]
    data = profile_file.merge(bench.base, [*bench.done, Part("launch", [*nothing, *counts, *known])], stamp)
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
