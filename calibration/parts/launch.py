"""What a launch costs the host, what waiting for another stream costs, and into how many kernels a layer falls."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibration.bench import Bench, Part, Value, row_of
from calibration.parts.gemm import layers_model
from herald_exec.attention import attend_partial, merge
from herald_exec.models import BlockModel
from herald_exec.streams import Completion, ThreadStreams

_LAUNCHES = 100


def measure(bench: Bench) -> Part:
    """Empty launches in a row on one stream, and back and forth between two."""
    part = Part("launch")
    cores = {"main": frozenset(bench.main_cores), "retrieval": frozenset(bench.retrieval_cores)}
    streams = ThreadStreams(("main", "retrieval"), {name: own for name, own in cores.items() if own})
    try:
        timings = bench.time_anywhere(
            {"in a row": lambda: _in_a_row(streams), "back and forth": lambda: _back_and_forth(streams)}
        )
    finally:
        streams.close()
    for name, timing in timings.items():
        part.rows.append(row_of(timing, case=name, launches=_LAUNCHES, us=round(timing.seconds / _LAUNCHES * 1e6, 2)))
    row = timings["in a row"]
    with torch.inference_mode():
        kernels = layer_kernels(bench)
    part.rows += [{"case": f"kernels, {name}", "launches": count} for name, count in kernels.items()]
    note = "torch operations that compute, counted in one layer"
    part.values = [
        Value(
            "engine.stage_overhead_us", "us", row.seconds / _LAUNCHES * 1e6, spread=row.spread, note="empty launches"
        ),
        Value("engine.kernels_per_layer", "kernels", float(kernels["denoise"]), note=note),
        Value("engine.retrieval_kernels_per_layer", "kernels", float(kernels["retrieval"]), note=note),
    ]
    return part


def _nothing(_: Completion) -> None:
    return None


def _in_a_row(streams: ThreadStreams) -> None:
    for _ in range(_LAUNCHES):
        last = streams.submit("main", "empty", _nothing, ())
    streams.wait(last)


def _back_and_forth(streams: ThreadStreams) -> None:
    earlier: tuple[Completion, ...] = ()
    for number in range(_LAUNCHES):
        earlier = (streams.submit(("main", "retrieval")[number % 2], "empty", _nothing, earlier),)
    streams.wait(earlier[0])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that are no mere views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "detach" not in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def layer_kernels(bench: Bench) -> dict[str, int]:
    """Kernels of one layer of a denoise forward, and of the part of a retrieval layer that runs on the device."""
    model, block = layers_model(bench), bench.block_length
    counts = {}
    for name, tokens in (("denoise", block), ("retrieval", 1)):
        with _Counting() as counting:
            _layer(bench, model, tokens, attends=name == "denoise")
        counts[name] = counting.count
    return counts


def _layer(bench: Bench, model: BlockModel, tokens: int, *, attends: bool) -> None:
    shape = model.shape
    hidden = bench.random(tokens, shape.hidden_size)
    q, k, v = model.project(0, hidden, model.rotary(torch.arange(tokens, device=bench.device)))
    attended = q
    if attends:
        q, k, v = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        attended = merge(attend_partial(q, k, v), attend_partial(q, k, v))[0]
    model.finish(0, hidden, attended)
