"""What steps and proxies lose to the rows that the device fetches beside them, in short decodes of few layers.

They begin and end as in any run of ``step-fetch``: a layer's step and the next layer's fetch together, a proxy within a
fetch. That decides which of them finds multiprocessors free: on an H200 a proxy of 38 requests beside fetches in a loop
takes 1.1 to 1.5 times its time alone, by where in a fetch it falls, and in these decodes 1.5 to 1.6 within a fetch, 1.1
where it begins with one. So they are timed there. Alone, a step is that of the last layer, behind which nothing is
fetched; a proxy is that of InfiniGen's step 0, before the fetch. Fetches: :mod:`calibration.gpu.fetch_beside_steps`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from calibration.bench import Bench, Part, Value, row_of
from calibration.parts.proxy import partial_bytes
from calibration.points import Point
from calibration.runs import run_point
from calibration.timing import Timing
from herald_exec.models import BlockModel, random_model
from herald_pipeline.trace import Span
from herald_pipeline.units import NS_PER_S

_LAYERS, _VOCABULARY = 4, 256
_BUDGET = 0.05
_LEAST = 0.5
"""Share of a launch that must lie beside the other for it to tell."""
_NOTE = "step-fetch, rows fetched by the device, {layers} layers; alone: its last layer's step, InfiniGen's proxy"


def batches(bench: Bench) -> tuple[int, ...]:
    """Requests: a step's kernels fill the device from some number on, and then have less of it beside a fetch."""
    return (4, 16, 38) if bench.on_cuda else (1, 2)


def context(bench: Bench) -> int:
    """Entries of a request."""
    return 32768 if bench.on_cuda else 256


@dataclass
class Factors:
    """Times as long, by what they depend on: token rows of a step, the bytes of a proxy's partial keys."""

    step: dict[float, float] = field(default_factory=dict)
    proxy: dict[float, float] = field(default_factory=dict)

    def values(self, spread: float, note: str) -> list[Value]:
        """The engine's numbers; nothing is faster for what runs beside it."""
        found = []
        for name, unit, by in (
            ("step_beside_row_fetch", "rows", self.step),
            ("proxy_beside_row_fetch", "B", self.proxy),
        ):
            at = tuple(sorted(by))
            found.append(Value(f"engine.{name}", "x", tuple(max(1.0, by[x]) for x in at), at, unit, spread, note))
        return found


def measure(bench: Bench, part: Part) -> None:
    """Run both methods at each batch; launches and factors go to ``part``."""
    model, length, factors, spread = _few_layers(bench), context(bench), Factors(), 0.0
    for rows in batches(bench):
        together = _spans(bench, model, Point("step-fetch", length, rows, 4, 3, conditions=(("gather", "gpu"),)))
        apart = _spans(bench, model, Point("infinigen", length, rows, 2, 6))
        size = float(median(span.bytes for span in _chosen(together, "upload")))
        for kind, found, by, at in (
            ("step", steps(together), factors.step, float(rows * bench.block_length)),
            ("proxy", proxies(together, apart), factors.proxy, partial_bytes(bench, rows, length)),
        ):
            by[at] = found.longer
            spread = max(spread, found.beside.spread)
            for timing, beside in ((found.alone, ""), (found.beside, "row fetch")):
                columns = {"rows": rows, "bytes": size, "times_as_long": round(found.longer, 3)}
                part.rows.append(row_of(timing, case=f"{kind}, in a run", beside=beside, **columns))
    part.values += factors.values(round(spread, 4), _NOTE.format(layers=model.shape.num_layers))


@dataclass(frozen=True, slots=True)
class Compared:
    """Launches alone, launches beside another, and how many times as long the latter take while it is under way."""

    alone: Timing
    beside: Timing
    longer: float


def steps(together: Sequence[Span]) -> Compared:
    """Steps beside the next layer's fetch; the first layer, which may have no experts, tells nothing of the others."""
    last = max(span.layer or 0 for span in together if span.stage == "step_layer")
    of_layer = _chosen(together, "step_layer", lambda layer: layer > 0)
    alone = [span for span in of_layer if span.layer == last]
    beside = [span for span in of_layer if span.layer != last]
    return compared("step", alone, beside, _chosen(together, "upload"))


def proxies(together: Sequence[Span], apart: Sequence[Span]) -> Compared:
    """Proxies beside a fetch; that of the first layer begins a step, too."""
    alone, beside = (_chosen(spans, "proxy", lambda layer: layer > 0) for spans in (apart, together))
    return compared("proxy", alone, beside, _chosen(together, "upload"))


def compared(name: str, alone: Sequence[Span], beside: Sequence[Span], others: Sequence[Span]) -> Compared:
    """How much slower launches ``beside`` go while one of ``others`` is under way than those ``alone``.

    The part of a launch that has none beside it goes at full speed; what is then left of its time alone took the rest.
    """
    whole = median(_seconds(span) for span in alone)
    factors = []
    for span in beside:
        both = _overlap(span, others)
        left = whole - (_seconds(span) - both)
        if both > _LEAST * _seconds(span) and left > 0:
            factors.append(both / left)
    longer = max(1.0, median(factors)) if factors else 1.0
    apart, together = (tuple(map(_seconds, spans)) for spans in (alone, beside))
    return Compared(Timing(f"{name} alone", apart, 1), Timing(f"{name} beside", together, 1), longer)


def _chosen(spans: Iterable[Span], stage: str, layer: Callable[[int], bool] = lambda _: True) -> list[Span]:
    return [span for span in spans if span.stage == stage and layer(span.layer or 0)]


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / NS_PER_S


def _overlap(span: Span, others: Iterable[Span]) -> float:
    """Seconds of ``span`` in which one of ``others`` is under way; these follow one another."""
    shared = (min(span.end_ns, other.end_ns) - max(span.start_ns, other.start_ns) for other in others)
    return sum(time for time in shared if time > 0) / NS_PER_S


def _few_layers(bench: Bench) -> BlockModel:
    """Some of the model's layers, with a vocabulary that is next to nothing."""
    shape = bench.shape
    few = replace(
        shape,
        num_layers=min(_LAYERS, shape.num_layers),
        vocab_size=_VOCABULARY,
        mask_token_id=_VOCABULARY - 1,
        eos_token_ids=(),
    )
    return random_model(few, device=bench.device, dtype=bench.dtype)


def _spans(bench: Bench, model: BlockModel, point: Point) -> list[Span]:
    """Launches of one run, the first block left out."""
    chosen = replace(point, block_length=bench.block_length, kv_dtype=str(bench.kv_dtype), budget=_BUDGET)
    run = run_point(chosen, model, keep_trace=True, threads=len({*bench.main_cores, *bench.retrieval_cores}))
    assert run.trace is not None
    return [span for span in run.trace.spans if span.block > 0]
