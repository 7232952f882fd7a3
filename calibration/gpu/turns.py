"""How long a kernel of a high-priority stream waits for the kernel of the main stream that is under way.

It gets room as thread blocks of that kernel end, not when all have: how much sooner depends on the kernels, so they are
those of a step. A chain of kernels that do next to nothing tells: what each takes longer beside passes of layers is its
wait, as a share of the wait that the cost model would foresee.
"""

import time

import torch

from calibration.bench import Bench, Beside, Part, Value, row_of
from calibration.gpu import attention, layers, load
from calibration.gpu.graphs import captured
from calibration.timing import Timing, Work

_KERNELS = 64
"""Of a chain: so many that launching the graph is little of it."""
_SAMPLES, _REST_S = 60, 0.002
"""Chains, and the rest before each: they begin anywhere in a pass."""
_AHEAD = 2
"""Passes of the main stream that are issued at once, so that it never rests."""
_LAYER_KERNELS = 7
"""Kernels of a layer without experts in a step (:mod:`calibration.gpu.launches`)."""
LEAST = 0.001
"""A share must be above 0, and a wait can be too short to see."""


def measure(bench: Bench, part: Part) -> Value:
    """``engine.turn_wait_share``; chains alone and beside passes go to ``part``."""
    rows, length = (80, int(attention.SELECTED * 32768) + bench.block_length) if bench.on_cuda else (1, 64)
    model, pool = layers.layers_model(bench), attention.Pool(bench, ((rows, length),))
    layer = layers.layer(bench, model, rows * bench.block_length)
    step = captured(bench, {"": load.passes(bench, pool, layer, rows, length)})[""]
    bench.time({"pass": step})  # the clock settles; the second timing counts, as chains run beside settled passes
    whole = bench.time({"pass": step})["pass"]
    chain = _Chain(bench)
    alone = Timing("alone", chain.samples(), 1)
    with Beside((), _several(bench, step)):
        beside = Timing("beside", chain.samples(), 1)
    kernel_s = whole.seconds / (_LAYER_KERNELS * bench.shape.num_layers)
    share = wait_share(alone.seconds, beside.seconds, kernel_s)
    for timing in (alone, beside):
        columns = {"beside": "passes" if timing is beside else "", "launches": _KERNELS, "kernel_s": kernel_s}
        part.rows.append(row_of(timing, case="chain of small kernels", **columns))
    note = f"{_KERNELS} small kernels of a priority stream beside layers of {rows} requests over {length} entries"
    return Value("engine.turn_wait_share", "share", share, spread=round(beside.spread, 4), note=note)


def wait_share(alone_s: float, beside_s: float, kernel_s: float) -> float:
    """Wait of one of a chain's kernels over the mean time of those that it waits for; within what a share can be."""
    return min(1.0, max(LEAST, (beside_s - alone_s) / _KERNELS / kernel_s))


def _several(bench: Bench, replay: Work) -> Work:
    def run() -> None:
        with torch.cuda.stream(bench.stream):
            for _ in range(_AHEAD):
                replay()
            bench.stream.synchronize()

    return run


class _Chain:
    """Kernels that follow one another on a stream of high priority, as one graph."""

    def __init__(self, bench: Bench) -> None:
        self._stream = torch.cuda.Stream(bench.device, priority=-1)  # type: ignore[no-untyped-call]
        self._value = torch.zeros(256, device=bench.device)
        torch.cuda.synchronize(bench.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(_KERNELS):
                self._value.add_(1.0)

    def samples(self) -> tuple[float, ...]:
        """Seconds of chains, on the device's clock."""
        return tuple(self._seconds() for _ in range(_SAMPLES))

    def _seconds(self) -> float:
        time.sleep(_REST_S)
        with torch.cuda.stream(self._stream):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            self._graph.replay()
            after.record()
            after.synchronize()
        return float(before.elapsed_time(after)) / 1e3
