"""The experts' grouped products by tokens, how rows are padded, and how independently tokens route.

A dense model has no experts; then nothing is measured, and a profile without these numbers refuses MoE models.
"""

from dataclasses import replace

import torch

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.parts.gemm import token_rows
from calibration.timing import Work
from herald_exec.models import random_model
from herald_exec.models.layers import experts_forward, route
from herald_exec.models.weights import ExpertWeights
from herald_pipeline.units import GB

_TILE_ROWS = 1
"""The CPU's loop over experts pads nothing."""


def measure(bench: Bench) -> Part:
    """One layer's experts, routed by random hidden states."""
    part = Part("grouped-gemm")
    moe = bench.shape.moe
    if moe is None:
        return part
    if bench.fused:
        from calibration.gpu import steps

        steps.measure_experts(bench, part)
        return part
    shape = replace(bench.shape, num_layers=1, vocab_size=256, moe=replace(moe, first_dense_layers=0))
    ffn = random_model(shape, device=bench.device, dtype=bench.dtype).weights.layers[0].ffn
    assert isinstance(ffn, ExpertWeights)
    rows = token_rows(bench)
    hits: dict[int, int] = {}

    def case(n: int) -> Work:
        x = bench.random(n, shape.hidden_size)
        scores = torch.nn.functional.linear(x.to(ffn.router.dtype), ffn.router)
        experts, weights = route(scores, ffn.bias, moe)
        hits[n] = len(set(experts.flatten().tolist()))
        return lambda: experts_forward(x, ffn.gate_up, ffn.down, experts, weights)

    with torch.inference_mode():
        cases = {str(n): case(n) for n in rows}
    timings = bench.time(cases)
    peak = bench.rate("machine.gpu.peak_tflop_s", "gemm") * 1e12
    tile = _TILE_ROWS
    params = shape.expert_params
    efficiency = []
    for n in rows:
        flops = 2.0 * n * moe.experts_per_token * params
        padded = flops * (1 + hits[n] * tile / 2 / (n * moe.experts_per_token))
        seconds = timings[str(n)].seconds
        efficiency.append(min(1.0, padded / seconds / peak))
        gb_s = hits[n] * params * bench.dtype.itemsize / seconds / GB
        part.rows.append(
            row_of(
                timings[str(n)], rows=n, experts_hit=hits[n], gflop_s=round(flops / seconds / GB, 2), weights_gb_s=gb_s
            )
        )
    part.values = [
        Value(
            "engine.grouped_gemm_efficiency",
            "share",
            tuple(efficiency),
            tuple(float(n) for n in rows),
            "rows",
            widest(timings.values()),
            f"{moe.num_experts} experts, {moe.experts_per_token} a token, {bench.dtype}",
        ),
        Value(
            "engine.grouped_gemm_tile_rows",
            "rows",
            float(tile),
            datasheet="a product an expert: no padding",
        ),
        Value(
            "engine.routed_token_share",
            "share",
            routed_share(hits, moe.num_experts, moe.experts_per_token),
            note="random hidden states: [MASK] tokens of a trained model route more alike",
        ),
    ]
    return part


def routed_share(hits: dict[int, int], num_experts: int, per_token: int) -> float:
    """Share of tokens that would have to route independently for as many experts to be hit; at most 1."""
    shares = []
    miss = 1 - per_token / num_experts
    for tokens, hit in hits.items():
        if 0 < hit < num_experts and 0 < miss < 1:
            independent = torch.log(torch.tensor(1 - hit / num_experts)) / torch.log(torch.tensor(miss))
            shares.append(float(independent) / tokens)
    return min(1.0, sorted(shares)[len(shares) // 2]) if shares else 1.0
