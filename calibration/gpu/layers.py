"""Dense products of a layer on a GPU, and the fixed cost of a layer around attention."""

from dataclasses import replace

import torch
from torch.nn import functional

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.gpu.graphs import timed
from calibration.parts import gemm
from calibration.timing import Work
from herald_exec.models import BlockModel, random_model
from herald_pipeline.units import GB

PRODUCTS = "products of a layer"
"""Table of :attr:`Bench.tables`: seconds of a layer's dense products by rows."""


def token_rows(bench: Bench) -> tuple[int, ...]:
    """Rows of the retrieval pass (one a request), of steps of 1 to 160 blocks, of draft steps."""
    block = bench.block_length
    if not bench.on_cuda:
        return (1, block, 4 * block)
    return (1, 16, block, 80, 4 * block, 16 * block, 40 * block, 80 * block, 160 * block)


def layers_model(bench: Bench) -> BlockModel:
    """The model's dense matrices alone; of a mixture of experts those of attention and of the shared expert.

    Enough layers that their weights come from memory in every layer, as in a step.
    """
    shape = bench.shape
    if shape.moe is not None:
        width = max(shape.head_dim, shape.moe.num_shared_experts * shape.moe.expert_intermediate_size)
        shape = replace(shape, moe=None, intermediate_size=width)
    return random_model(
        replace(shape, vocab_size=256, mask_token_id=255, eos_token_ids=()), device=bench.device, dtype=bench.dtype
    )


def measure(bench: Bench, part: Part) -> None:
    """Share of the peak by rows, fixed cost of a layer."""
    peak = bench.found[gemm.PEAK] * 1e12
    model, rows = layers_model(bench), token_rows(bench)
    cases: dict[str, Work] = {}
    for n in rows:
        cases[f"products {n}"] = gemm.products(bench, model, n)
        cases[f"layer {n}"] = layer(bench, model, n)
    timings = timed(bench, cases)
    count = model.shape.num_layers
    params = sum(matrix.numel() for matrix in gemm.matrices(model, 0))
    products = {n: timings[f"products {n}"].seconds / count for n in rows}
    around = {n: timings[f"layer {n}"].seconds / count for n in rows}
    overhead = max(0.0, around[rows[0]] - products[rows[0]])
    # Of a mixture of experts, what grows with the rows besides products is in the experts' curve.
    whole = around if bench.shape.moe is None else {n: products[n] + overhead for n in rows}
    share = {n: min(1.0, 2.0 * n * params / max(whole[n] - overhead, 1e-9) / peak) for n in rows}
    bench.tables[PRODUCTS] = {float(n): whole[n] - overhead for n in rows}
    bench.tables["layer overhead"] = {1.0: overhead}
    bench.tables["parameters of a layer"] = {1.0: float(params)}
    for n in rows:
        for case in ("products", "layer"):
            timing = timings[f"{case} {n}"]
            gflop_s = round(2.0 * n * params * count / timing.seconds / GB, 2)
            part.rows.append(row_of(timing, case=case, rows=n, layers=count, gflop_s=gflop_s))
    spread, first = widest(timings.values()), timings[f"layer {rows[0]}"]
    note = f"dense products of {bench.shape.name}'s layers in a graph, {bench.dtype}"
    at, shares = tuple(float(n) for n in rows), tuple(share[n] for n in rows)
    part.values += [
        Value("engine.gemm_efficiency", "share", shares, at, "rows", spread, note),
        Value(
            "engine.layer_overhead_us",
            "us",
            overhead * 1e6,
            spread=round(first.spread, 4),
            note="one row, in a graph: what a layer does besides attention and products",
        ),
        Value(
            "engine.block_us",
            "us",
            products[rows[0]] / len(gemm.matrices(model, 0)) * 1e6,
            spread=round(timings[f"products {rows[0]}"].spread, 4),
            note="a product of one row, which has few blocks, in a graph; mean of a layer's",
        ),
    ]


def layer(bench: Bench, model: BlockModel, rows: int, distinct: int | None = None) -> Work:
    """All layers around attention: joined projection, heads into place, output projection, norms, feed-forward.

    ``distinct``: how many of the rows differ; ``None``: all.
    """
    from herald_exec.cuda.feed_forward import FeedForward
    from herald_exec.cuda.kernels.placing import place_heads

    shape, forward = model.shape, FeedForward(model)
    alike = torch.arange(rows, device=bench.device) % (distinct or rows)
    hidden = bench.random(rows, shape.hidden_size)[alike]
    attended = bench.random(rows, shape.num_heads * shape.head_dim)[alike]
    rotary = model.rotary(torch.arange(rows, device=bench.device))
    heads = (shape.num_heads, shape.num_kv_heads)
    lanes = max(1, rows // bench.block_length)
    lanes = lanes if rows % lanes == 0 else rows

    def run() -> None:
        state, normed = hidden, hidden
        for index, weights in enumerate(model.weights.layers):
            joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
            place_heads(joined, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, lanes, heads)
            state, normed = forward(index, state, attended)

    return run


def product_seconds(bench: Bench, rows: int, params: int) -> float:
    """Seconds of a product of ``rows`` rows with ``params`` weights, as the cost model prices it from the tables."""
    from calibration.gpu.steps import interpolated

    table = bench.table(PRODUCTS, "gemm")
    model_params = bench.tables["parameters of a layer"][1.0]
    share = {n: 2.0 * n * model_params / seconds for n, seconds in table.items()}
    return 2.0 * rows * params / interpolated(share, rows)
