"""Launches of the executor's graphs: kernels of a layer, and what a retrieval layer's products take."""

from calibration.bench import Bench, Value
from calibration.gpu import layers
from calibration.gpu.steps import interpolated

_DENSE, _MOE = 7, 12
"""Kernels of a layer of :class:`herald_exec.cuda.forward.LaneForward`, with a dense feed-forward and with experts."""
_LANES = 160
"""Beyond, padding is less than 5%."""
_EXCHANGE = 5
"""Beside them in a retrieval layer: three conversions of queries, keys and values to fp32, two of the output."""


def kernel_counts(bench: Bench) -> list[Value]:
    """Kernels of a layer in a step and in the retrieval pass, whose attention runs on the CPU."""
    count = _DENSE if bench.shape.moe is None else _MOE
    source = "counted by reading herald_exec/cuda/forward.py and selection.py"
    return [
        Value("engine.kernels_per_layer", "kernels", float(count), datasheet=source),
        Value("engine.retrieval_kernels_per_layer", "kernels", float(count - 1 + _EXCHANGE), datasheet=source),
        padding(),
    ]


def padding() -> Value:
    """Lanes of a step's graph over those that it has."""
    from herald_exec.cuda.lanes import bucket

    at = tuple(range(1, _LANES + 1))
    padded = tuple(round(bucket(n) / n, 4) for n in at)
    source = "counted: herald_exec/cuda/lanes.py, bucket"
    return Value("engine.lane_padding", "x", padded, tuple(map(float, at)), "lanes", datasheet=source)


def layer_seconds(bench: Bench, rows: int) -> float:
    """Seconds of a layer around attention at ``rows`` rows, as the tables of earlier parts have it."""
    found = interpolated(bench.table(layers.PRODUCTS, "gemm"), rows)
    if bench.shape.moe is not None:
        found += interpolated(bench.table("experts of a layer", "grouped-gemm"), rows)
    return found
