"""Dense products: the highest rate that a square one reaches, and the rate of a layer's products by token rows.

The layers of the model run one after another, as in a step, so that weights come from where they come from in a step.
What a layer does besides its products (norms, rotation, activation, launch gaps) is the layer overhead at one row; what
grows with the rows is inside the efficiency curve.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from calibration.bench import Bench, Part, Row, Value, row_of, widest
from calibration.timing import Timing, Work
from herald_exec.models import BlockModel, random_model
from herald_exec.models.weights import DenseWeights
from herald_pipeline.units import GB
from herald_pipeline.work import WEIGHT_BYTES

PEAK = "machine.gpu.peak_tflop_s"
_MAX_WEIGHT_BYTES = 4 * GB


def measure(bench: Bench) -> Part:
    """Peak rate, then products and whole layers (without attention) over token rows."""
    from calibration.gpu import layers as layers_on_gpu

    part = Part("gemm")
    rows_of_peak, values_of_peak = peak_part(bench)
    part.rows += rows_of_peak
    part.values += values_of_peak
    if bench.fused:
        layers_on_gpu.measure(bench, part)
        return part
    peak = bench.found[PEAK] * 1e12
    model = layers_model(bench)
    rows = token_rows(bench)
    cases: dict[str, Work] = {}
    for n in rows:
        cases[f"products {n}"] = products(bench, model, n)
        cases[f"layers {n}"] = layers(bench, model, n)
    timings = bench.time(cases)
    shape = model.shape
    params = sum(part_.numel() for part_ in matrices(model, 0))
    overhead_s = max(0.0, (timings[f"layers {rows[0]}"].seconds - timings[f"products {rows[0]}"].seconds))
    overhead_s /= shape.num_layers
    efficiency = []
    for n in rows:
        layer, product = timings[f"layers {n}"], timings[f"products {n}"]
        flops = 2.0 * n * params
        seconds = max(layer.seconds / shape.num_layers - overhead_s, flops / peak)
        efficiency.append(min(1.0, flops / seconds / peak))
        part.rows += [
            _row(product, shape.num_layers, n, flops, case="products"),
            _row(layer, shape.num_layers, n, flops, case="layer without attention"),
        ]
    one = timings[f"products {rows[0]}"].seconds / shape.num_layers
    counted = params * WEIGHT_BYTES / one / GB
    rate = bench.rate("machine.gpu.bandwidth_gb_s", "attention")
    note = f"products of {bench.shape.name}'s layers, {bench.dtype}, norms and activation of more than one row included"
    part.values += [
        Value(
            "engine.gemm_efficiency",
            "share",
            tuple(efficiency),
            tuple(float(n) for n in rows),
            "rows",
            widest(timings.values()),
            note,
        ),
        Value(
            "engine.weight_read_efficiency",
            "share",
            min(1.0, counted / rate),
            spread=timings[f"products {rows[0]}"].spread,
            note=f"one row; bytes counted as {WEIGHT_BYTES:g} a parameter, whatever the format here ({bench.dtype})",
        ),
        Value("engine.layer_overhead_us", "us", overhead_s * 1e6, spread=timings[f"layers {rows[0]}"].spread),
    ]
    return part


def token_rows(bench: Bench) -> tuple[int, ...]:
    """Token rows at which products are measured."""
    block = bench.block_length
    few = (1, 2, 4, 8, block // 2, block, 2 * block, 4 * block, 8 * block)
    many = () if bench.quick else (16 * block, 40 * block, 80 * block)
    return tuple(sorted({n for n in (*few, *many) if n > 0}))


def layers_model(bench: Bench) -> BlockModel:
    """The model's layers with a dense feed-forward, as many as fit :data:`_MAX_WEIGHT_BYTES`."""
    shape = replace(bench.shape, moe=None, vocab_size=256)
    one = (shape.attention_params_per_layer + shape.dense_ffn_params) * bench.dtype.itemsize
    count = max(1, min(shape.num_layers, int(_MAX_WEIGHT_BYTES // one)))
    return random_model(replace(shape, num_layers=count), device=bench.device, dtype=bench.dtype)


def products(bench: Bench, model: BlockModel, rows: int) -> Work:
    """All layers' matrix products over ``rows`` rows, and nothing else."""
    inputs = [[bench.random(rows, w.shape[1]) for w in matrices(model, i)] for i in range(model.shape.num_layers)]

    def run() -> None:
        for layer, given in enumerate(inputs):
            for x, weight in zip(given, matrices(model, layer), strict=True):
                functional.linear(x, weight)

    return run


def layers(bench: Bench, model: BlockModel, rows: int) -> Work:
    """All layers' projections and what follows attention, over ``rows`` rows."""
    shape = model.shape
    hidden = bench.random(rows, shape.hidden_size)
    attention = bench.random(rows, shape.num_heads, shape.head_dim)
    rotary = model.rotary(torch.arange(rows, device=bench.device))

    def run() -> None:
        for layer in range(shape.num_layers):
            model.project(layer, hidden, rotary)
            model.finish(layer, hidden, attention)

    return run


def matrices(model: BlockModel, layer: int) -> tuple[torch.Tensor, ...]:
    """Matrices of a layer with a dense feed-forward."""
    weights = model.weights.layers[layer]
    assert isinstance(weights.ffn, DenseWeights)
    return weights.qkv, weights.output, weights.ffn.gate_up, weights.ffn.down


def peak_flops(bench: Bench) -> float:
    """Highest FLOP/s of square products."""
    peak_part(bench)
    return bench.found[PEAK] * 1e12


def peak_part(bench: Bench) -> tuple[list[Row], list[Value]]:
    """Rows and quantity of the highest rate of square products, measured once for all parts."""
    if bench.square is not None:
        return bench.square
    sizes = (512, 768, 1024) if not bench.on_cuda else (4096, 8192)
    pairs = {n: (bench.random(n, n), bench.random(n, n)) for n in sizes}
    timings = bench.time({str(n): lambda n=n: pairs[n][0] @ pairs[n][1] for n in sizes})  # type: ignore[misc]
    rates = {n: 2.0 * n**3 / timings[str(n)].seconds for n in sizes}
    best = max(rates, key=rates.__getitem__)
    rows = [row_of(timings[str(n)], case="square", rows=n, gflop_s=round(rates[n] / GB, 2)) for n in sizes]
    bench.found[PEAK] = rates[best] / 1e12
    note = f"square of {best}, {bench.dtype}"
    values = [Value(PEAK, "TFLOP/s", bench.found[PEAK], spread=timings[str(best)].spread, note=note)]
    bench.square = rows, values
    return bench.square


def _row(timing: Timing, num_layers: int, rows: int, flops: float, case: str) -> dict[str, object]:
    gflop_s = round(flops * num_layers / timing.seconds / GB, 2)
    return row_of(timing, case=case, rows=rows, layers=num_layers, gflop_s=gflop_s)
