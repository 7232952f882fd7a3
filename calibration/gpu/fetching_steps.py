"""What steps, proxies and the rows that the device fetches beside them lose to each other, in short decodes.

Which of them finds multiprocessors free is decided by what begins first, and that by how long each takes. A fetch's
programs fill 48 multiprocessors where these are free, and lie two or three to one where they come among other kernels:
on an H200 those of 16 requests then take 1.33 or 1.54 ms in place of 1.07, and a proxy beside them 0.56 in place of
0.71. A loop of each shows the one or the other, so all are timed as a run of ``step-fetch`` has them: the model's own
layers, its vocabulary, steps that follow one another. In four layers the fetches of 16 requests were slow in the first
and in the last and fast between, in the twenty of a run they are slow in most. So there are more, as far as host memory
is page-locked in a few seconds; the ends of a step and completing steps, of which a run has few, are left out.

Alone, a step is that of the last layer, behind which nothing is fetched; a proxy and a fetch are those of InfiniGen's
step 0, one after the other. What begins a step waits for the host as well and is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from calibration.bench import Bench, Part, Row, Value, row_of
from calibration.parts.proxy import partial_bytes
from calibration.points import Point
from calibration.runs import run_point
from calibration.timing import Timing
from herald_exec.models import BlockModel
from herald_pipeline.settings import Settings
from herald_pipeline.trace import Span
from herald_pipeline.units import GB, NS_PER_S

_LEAST_LAYERS, _MOST_LAYERS, _HOST_BYTES = 6, 10, 11 * GB
"""Of a decode, and the host memory from which on it has fewer; an H200's host page-locks about 2.7 GB a second."""
_ALONE_LAYERS = 2
_STEPS, _BLOCKS = 8, 4
"""Of a decode; the first block is not counted."""
_BUDGET = 0.05
_LEAST = 0.5
"""Share of a step's launches that must lie beside the others for them to tell."""
_KERNELS = ("proxy", "step_layer", "decide")
_NOTE = "step-fetch, rows fetched by the device, up to {layers} layers; alone: {alone}"


def batches(bench: Bench) -> tuple[int, ...]:
    """Requests: a step's kernels fill the device from some number on, and then have less of it beside a fetch."""
    return (4, 16, 38) if bench.on_cuda else (1, 2)


def context(bench: Bench) -> int:
    """Entries of a request."""
    return 32768 if bench.on_cuda else 256


def layers(bench: Bench, rows: int, length: int) -> int:
    """Layers of a decode of so many requests; as a run has them, whole rounds of the ring, so that graphs fit."""
    layer_bytes = rows * length * bench.shape.kv_bytes_per_token_layer(bench.kv_dtype)
    held = min(_MOST_LAYERS, max(_LEAST_LAYERS, int(_HOST_BYTES / layer_bytes)), bench.shape.num_layers)
    return held - held % Settings().staging_buffers


@dataclass
class Factors:
    """Times as long, by what they depend on: token rows of a step, a proxy's partial keys, and a fetch's bytes."""

    step: dict[float, float] = field(default_factory=dict)
    proxy: dict[float, float] = field(default_factory=dict)
    fetch: dict[float, float] = field(default_factory=dict)

    def values(self, spread: float, most_layers: int) -> list[Value]:
        """The engine's numbers; nothing is faster for what runs beside it."""
        found = []
        for name, unit, by, alone in (
            ("step_beside_row_fetch", "rows", self.step, "the last layer's step"),
            ("proxy_beside_row_fetch", "B", self.proxy, "InfiniGen's proxy"),
            ("row_fetch_beside_step", "B", self.fetch, "InfiniGen's fetch"),
        ):
            at = tuple(sorted(by))
            y, note = tuple(max(1.0, by[x]) for x in at), _NOTE.format(layers=most_layers, alone=alone)
            found.append(Value(f"engine.{name}", "x", y, at, unit, spread, note))
        return found


def measure(bench: Bench, part: Part) -> None:
    """Run both methods at each batch; launches and factors go to ``part``."""
    length, factors, spread, most = context(bench), Factors(), 0.0, 0
    for rows in batches(bench):
        count = layers(bench, rows, length)
        fetching = Point("step-fetch", length, rows, _STEPS, _BLOCKS, conditions=(("gather", "gpu"),))
        together = _spans(bench, first_layers(bench.model, count), fetching)
        apart = _spans(bench, first_layers(bench.model, _ALONE_LAYERS), Point("infinigen", length, rows, 2, 6))
        size = float(median(span.bytes for span in together if span.stage == "upload"))
        for kind, other, found, by, at in (
            ("step", "row fetch", steps(together), factors.step, float(rows * bench.block_length)),
            ("proxy", "row fetch", proxies(together, apart), factors.proxy, partial_bytes(bench, rows, length)),
            ("row_fetch", "step and proxy", fetches(together, apart), factors.fetch, size),
        ):
            by[at] = found.longer
            spread, most = max(spread, found.beside.spread), max(most, count)
            for timing, beside in ((found.alone, ""), (found.beside, other)):
                columns = {"rows": rows, "bytes": size, "times_as_long": round(found.longer, 3)}
                part.rows.append(row_of(timing, case=f"{kind}, in a run", beside=beside, **columns))
        part.rows += _order(together, rows)
    part.values += factors.values(round(spread, 4), most)


def first_layers(model: BlockModel, count: int) -> BlockModel:
    """The model with its first ``count`` layers alone; weights are shared."""
    weights = replace(model.weights, layers=model.weights.layers[:count])
    return BlockModel(replace(model.shape, num_layers=len(weights.layers)), weights)


@dataclass(frozen=True, slots=True)
class Compared:
    """Launches alone, launches beside others, and how many times as long the latter take while these are under way."""

    alone: Timing
    beside: Timing
    longer: float


def steps(together: Sequence[Span]) -> Compared:
    """Steps beside the next layer's fetch."""
    last = _last_layer(together)
    alone = [span for span in together if span.stage == "step_layer" and span.layer == last]
    return compared("step", alone, _within(together, "step_layer"), together, ("upload",))


def proxies(together: Sequence[Span], apart: Sequence[Span]) -> Compared:
    """Proxies beside the fetch of the layer before."""
    return compared("proxy", _behind_first(apart, "proxy"), _within(together, "proxy"), together, ("upload",))


def fetches(together: Sequence[Span], apart: Sequence[Span]) -> Compared:
    """Fetches beside a step and the next layer's proxy."""
    return compared("row fetch", _behind_first(apart, "fetch"), _within(together, "upload"), together, _KERNELS)


def compared(
    name: str, alone: Sequence[Span], beside: Sequence[Span], spans: Iterable[Span], others: Sequence[str]
) -> Compared:
    """How much slower launches ``beside`` go while one of the stages ``others`` is under way than those ``alone``.

    The part of a launch that has none beside it goes at full speed; what is then left of its time alone took the rest.
    Launches of a step count together, for some find the device free and others do not; the median is over steps.
    """
    whole = median(_seconds(span) for span in alone)
    others_of = _by_step(span for span in spans if span.stage in others)
    factors = []
    for step, launches in _by_step(beside).items():
        time = sum(map(_seconds, launches))
        both = sum(_overlap(span, others_of.get(step, ())) for span in launches)
        left = whole * len(launches) - (time - both)
        if both > _LEAST * time and left > 0:
            factors.append(both / left)
    longer = max(1.0, median(factors)) if factors else 1.0
    apart, together = (tuple(map(_seconds, found)) for found in (alone, beside))
    return Compared(Timing(f"{name} alone", apart, 1), Timing(f"{name} beside", together, 1), longer)


def _order(together: Sequence[Span], rows: int) -> list[Row]:
    """When fetches begin and when they were issued, which decides where their programs lie: no number of the profile.

    A fetch and the step of the layer before may begin at once; what was issued long before it begins waits for nothing
    but the device.
    """
    begun = {_key(span): span.start_ns for span in together if span.stage == "step_layer"}
    fetched = _within(together, "upload")
    behind = [span.start_ns - begun[key] for span in fetched if (key := (*_key(span)[:2], _key(span)[2] - 1)) in begun]
    issued = [span.start_ns - span.queued_ns for span in fetched]
    return [
        {
            "case": f"row_fetch, in a run: {what}",
            "rows": rows,
            "seconds": fmean(times) / NS_PER_S,
            "samples": len(times),
            "all_seconds": " ".join(f"{time / NS_PER_S:.3g}" for time in times),
        }
        for what, times in (("begins behind the step", behind), ("begins behind its issue", issued))
        if times
    ]


def _within(spans: Sequence[Span], stage: str) -> list[Span]:
    """Launches of a stage between the ends of a step."""
    last = _last_layer(spans)
    return [span for span in spans if span.stage == stage and 1 < (span.layer or 0) < last]


def _behind_first(spans: Sequence[Span], stage: str) -> list[Span]:
    return [span for span in spans if span.stage == stage and span.layer]


def _last_layer(spans: Iterable[Span]) -> int:
    return max(span.layer or 0 for span in spans)


def _key(span: Span) -> tuple[int, int, int]:
    return span.block, span.step, span.layer or 0


def _by_step(spans: Iterable[Span]) -> Mapping[tuple[int, int], list[Span]]:
    found: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        found.setdefault((span.block, span.step), []).append(span)
    return found


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / NS_PER_S


def _overlap(span: Span, others: Iterable[Span]) -> float:
    """Seconds of ``span`` in which one of ``others`` is under way; these follow one another."""
    shared = (min(span.end_ns, other.end_ns) - max(span.start_ns, other.start_ns) for other in others)
    return sum(time for time in shared if time > 0) / NS_PER_S


def _spans(bench: Bench, model: BlockModel, point: Point) -> list[Span]:
    """Launches of one run; the first block and completing steps are left out."""
    chosen = replace(point, block_length=bench.block_length, kv_dtype=str(bench.kv_dtype), budget=_BUDGET)
    run = run_point(chosen, model, keep_trace=True, threads=len({*bench.main_cores, *bench.retrieval_cores}))
    assert run.trace is not None
    return [span for span in run.trace.spans if span.block > 0 and span.step < chosen.steps]
