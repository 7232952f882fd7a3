"""The proxy of InfiniGen and ``step-fetch``: projection, scores over partial keys, what picks by them, as one stage.

It is timed where it runs, in short decodes of InfiniGen over synthetic KV by a model of few layers: there nothing runs
beside it, for the fetch waits for what was picked. Whatever the executor makes of the stage is in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.points import Point
from calibration.runs import run_point
from calibration.timing import Timing
from herald_exec.models import BlockModel, random_model
from herald_pipeline.model import bytes_per_element
from herald_pipeline.settings import Settings
from herald_pipeline.trace import Span
from herald_pipeline.units import GB, NS_PER_S

_METHOD, _LAYERS, _VOCABULARY = "infinigen", 3, 256
ACCEPTANCE = "acceptance of a step"
"""Table of :attr:`Bench.tables`: seconds of acceptance, on a GPU."""
_STEPS, _BLOCKS = 2, 8
"""Of a run: a block has one proxy a layer. The first block is not counted, nor the first layer, which begins a step."""


def places(bench: Bench) -> tuple[tuple[int, int], ...]:
    """(requests, prefix): batches that hold partial keys on the device, at the contexts of runs."""
    if not bench.on_cuda:
        return ((1, 64), (2, 256))
    return ((1, 1024), (4, 4096), (4, 16384), (4, 32768), (16, 32768), (32, 32768))


def measure(bench: Bench) -> Part:
    """Share of the device memory's rate at which the stage passes over partial keys, by their bytes."""
    part, rate = Part("proxy"), bench.rate("machine.gpu.bandwidth_gb_s", "attention") * GB
    model, reached = _few_layers(bench), dict[float, list[float]]()
    timings, accepted = [], list[Timing]()
    for rows, length in places(bench):
        timing, acceptance = _timings(bench, model, rows, length)
        accepted.append(acceptance)
        part.rows.append(row_of(acceptance, case="acceptance", rows=rows, context=length))
        size = partial_bytes(bench, rows, length)
        reached.setdefault(size, []).append(min(1.0, size / timing.seconds / rate))
        part.rows.append(row_of(timing, case="proxy", rows=rows, context=length, bytes=size))
        timings.append(timing)
    at = tuple(sorted(reached))
    share = tuple(sum(reached[x]) / len(reached[x]) for x in at)
    note = f"whole stage of {_METHOD}, {bench.block_length} queries, over the bytes of the partial keys"
    part.values.append(Value("engine.proxy_efficiency", "share", share, at, "B", widest(timings), note))
    if bench.on_cuda:
        part.values.append(_acceptance(bench, accepted))
    return part


def _acceptance(bench: Bench, accepted: Sequence[Timing]) -> Value:
    """Behind a head of next to no vocabulary nothing is left of it but the choice's own kernels: so many for all."""
    seconds = median(timing.seconds for timing in accepted)
    bench.tables[ACCEPTANCE] = {1.0: seconds}
    note = f"steps of {_METHOD} that are a stage of their own, vocabulary of {_VOCABULARY}; median of all places"
    return Value("engine.acceptance_us", "us", seconds * 1e6, spread=widest(accepted), note=note)


def partial_bytes(bench: Bench, rows: int, length: int) -> float:
    """Bytes of the partial keys, as the description counts them."""
    shape = bench.shape
    entry = shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.kv_dtype, shape.head_dim)
    return float(rows * length * entry * Settings().proxy_fraction)


def _few_layers(bench: Bench) -> BlockModel:
    """Layers of the model's attention, without experts and with a vocabulary that is next to nothing."""
    shape = bench.shape
    width = shape.head_dim if shape.moe is not None else shape.intermediate_size
    few = replace(
        shape,
        moe=None,
        intermediate_size=width,
        num_layers=min(_LAYERS, shape.num_layers),
        vocab_size=_VOCABULARY,
        mask_token_id=_VOCABULARY - 1,
        eos_token_ids=(),
    )
    return random_model(few, device=bench.device, dtype=bench.dtype)


def _timings(bench: Bench, model: BlockModel, rows: int, length: int) -> tuple[Timing, Timing]:
    """Durations of the stage's launches in one run, and of what follows the head behind them."""
    point = Point(
        _METHOD,
        length,
        rows,
        steps=min(_STEPS, bench.block_length),
        blocks=_BLOCKS,
        block_length=bench.block_length,
        kv_dtype=str(bench.kv_dtype),
    )
    run = run_point(point, model, keep_trace=True, threads=len({*bench.main_cores, *bench.retrieval_cores}))
    assert run.trace is not None
    spans = [span for span in run.trace.spans if span.block > 0]

    def timing(stage: str, chosen: Iterable[Span]) -> Timing:
        return Timing(f"{stage} {rows}x{length}", tuple((s.end_ns - s.start_ns) / NS_PER_S for s in chosen), 1)

    proxies = (span for span in spans if span.stage == "proxy" and span.layer)
    return timing("proxy", proxies), timing("acceptance", (span for span in spans if span.stage == "decide"))
