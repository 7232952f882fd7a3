"""Steps of real runs at a shorter context: what a layer takes beside attention and dense products, and the host's turn.

Which experts tokens reach decides the time of grouped products, and it depends on what runs hold: [MASK] tokens of one
model route much alike, the more so the more entries their attention averages over. Of 256 experts 128 tokens of a small
model (ten layers, random weights) reached 37 at 1,024 entries, 29 at 4,096 and 26 at 16,384, and 30 in HERALD, which
selects of 16,384. So the experts are timed where they run: Dense decodes, by number of requests, at a context between
the few that HERALD attends to and all of Dense's; attention there, products and head, measured apart, are taken off.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch

from calibration.bench import Bench, Part, Value, row_of
from calibration.gpu import head, layers
from calibration.parts import proxy
from calibration.points import Point
from calibration.runs import run_point
from calibration.timing import Timing
from herald_pipeline.errors import ProfileError
from herald_pipeline.units import NS_PER_S

_STEPS = 20
_LEAST_SHARE = 0.01
_TILE_ROWS = 64
"""Rows to which torch's grouped product pads on CUDA (CUTLASS tile)."""


@dataclass(frozen=True, slots=True)
class Step:
    """Steps of one run: seconds on the device, the host's turn between two, positions that the head saw a block.

    ``first`` are those that begin a block, in which all is [MASK]; they are in ``device``, too.
    """

    batch: int
    device: Timing
    first: Timing
    gap: Timing
    head_share: float


def batches(bench: Bench) -> tuple[int, ...]:
    """Requests of a run; 160 blocks are also what a draft step of 80 requests forwards."""
    return (1, 4, 16, 40, 80, 160) if bench.on_cuda else (1, 2)


def context(bench: Bench) -> int:
    """Prefix of the runs: tokens route about as alike as at 32K; attention, which is taken off, is a part of a step.

    A dense model has nothing to route, and KV of 160 requests that may not fit the device at that length.
    """
    if not bench.on_cuda:
        return 2 * bench.block_length
    return 1024 if bench.shape.moe is None else 4096


def short_steps(bench: Bench) -> list[Step]:
    """Runs by number of requests; measured once for all parts that read them."""
    if not bench.steps:
        bench.steps = [_run(bench, batch) for batch in batches(bench)]
    return bench.steps


def _point(bench: Bench, method: str, batch: int, blocks: int = 4) -> Point:
    steps = min(_STEPS, bench.block_length)
    kv = str(bench.kv_dtype)
    return Point(
        method, context(bench), batch, steps=steps, blocks=blocks, block_length=bench.block_length, kv_dtype=kv
    )


def _run(bench: Bench, batch: int) -> Step:
    point = _point(bench, "dense", batch)
    run = run_point(point, bench.model, keep_trace=True, threads=len(bench.retrieval_cores) or None)
    assert run.trace is not None
    spans = [span for span in run.trace.spans if span.stage == "denoise" and span.block > 0]
    spans.sort(key=lambda span: span.start_ns)
    lasting = tuple((span.end_ns - span.start_ns) / NS_PER_S for span in spans)
    gaps = tuple(max(0, b.start_ns - a.end_ns) / NS_PER_S for a, b in pairwise(spans) if a.block == b.block)
    # Masked positions at the begin of each step, as the run accepted them: what the head ran on.
    accepted = run.commits[0][-1]
    left = [point.block_length - sum(accepted[:i]) for i in range(len(accepted))]
    share = sum(left) / len(left) / point.block_length
    name = f"{batch} requests"
    begins = {span.block: i for i, span in reversed(list(enumerate(spans)))}
    first = tuple(lasting[i] for i in begins.values())
    return Step(batch, Timing(name, lasting, 1), Timing(name, first, 1), Timing(name, gaps, 1), share)


def measure_experts(bench: Bench, part: Part) -> None:
    """Efficiency of the grouped products by rows, and how independently tokens route."""
    moe = bench.shape.moe
    assert moe is not None
    hits = _hits(bench)
    share = routed(hits, moe.num_experts, moe.experts_per_token)
    peak = bench.rate("machine.gpu.peak_tflop_s", "gemm") * 1e12
    params = bench.shape.expert_params
    efficiency, seconds, first = {}, {}, {}
    for step in short_steps(bench):
        n = step.batch * bench.block_length
        seconds[n] = _experts_seconds(bench, step)
        hit = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** (share * n))
        rows = n * moe.experts_per_token
        flops = 2.0 * rows * params * (1 + hit * _TILE_ROWS / 2 / rows)
        efficiency[n] = min(1.0, flops / seconds[n] / peak)
        first[n] = first_share(bench, step, seconds[n])
        columns = {
            "rows": n,
            "experts_hit": round(hit, 1),
            "experts_us": round(seconds[n] * 1e6, 2),
            "first_share": round(first[n], 4),
        }
        part.rows.append(row_of(step.device, case="step at a short context", **columns))
    part.rows += [{"case": "experts hit", "rows": n, "experts_hit": hit} for n, hit in hits.items()]
    bench.tables["experts of a layer"] = {float(n): time for n, time in seconds.items()}
    at = tuple(float(n) for n in sorted(efficiency))
    spread = round(max(step.device.spread for step in short_steps(bench)), 4)
    note = (
        f"{moe.num_experts} experts, {moe.experts_per_token} a token, {bench.dtype}: steps of runs at {context(bench)} "
        "tokens, less attention, dense products, head and acceptance; routing, permutation and norms included"
    )
    curve = tuple(efficiency[int(n)] for n in at)
    part.values = [
        Value("engine.grouped_gemm_efficiency", "share", curve, at, "rows", spread, note),
        Value("engine.grouped_gemm_tile_rows", "rows", float(_TILE_ROWS), datasheet="torch grouped_mm on CUDA"),
        Value("engine.routed_token_share", "share", share, note="random weights, [MASK] and accepted tokens of runs"),
        Value(
            "engine.first_step_experts_share",
            "share",
            tuple(first[int(n)] for n in at),
            at,
            "rows",
            round(max(step.first.spread for step in short_steps(bench)), 4),
            "first steps of blocks, which hold [MASK] alone, over the others",
        ),
    ]


def first_share(bench: Bench, step: Step, experts_s: float) -> float:
    """Time of the experts in a block's first step over their time in the others: what else differs is the head's."""
    n, table = step.batch * bench.block_length, bench.table(head.TABLE, "sampler")
    shorter = step.device.seconds - step.first.seconds
    shorter += interpolated(table, n) - interpolated(table, max(1.0, n * step.head_share))
    return min(1.0, max(_LEAST_SHARE, 1.0 - shorter / bench.shape.num_moe_layers / experts_s))


def _experts_seconds(bench: Bench, step: Step) -> float:
    """Seconds of one layer's experts: what is left of a step, over the layers that have them."""
    shape, n = bench.shape, step.batch * bench.block_length
    product = interpolated(bench.table(layers.PRODUCTS, "gemm"), n) + bench.tables["layer overhead"][1.0]
    masked = max(1.0, n * step.head_share)
    head_s = interpolated(bench.table(head.TABLE, "sampler"), masked)
    attention_s = shape.num_layers * _attention_seconds(bench, step.batch)
    head_s += bench.table(proxy.ACCEPTANCE, "proxy")[1.0]
    rest = step.device.seconds - head_s - attention_s - shape.num_layers * product
    if rest <= 0:
        raise ProfileError(
            f"steps of {step.batch} requests take {step.device.seconds * 1e3:.3f} ms, no more than attention "
            f"({attention_s * 1e3:.3f}), products ({shape.num_layers * product * 1e3:.3f}), head and "
            f"acceptance ({head_s * 1e3:.3f}) measured apart; measure again: --only attention --only gemm --only proxy "
            "--only grouped-gemm"
        )
    return rest / shape.num_moe_layers


def _attention_seconds(bench: Bench, batch: int) -> float:
    """One layer's attention at the runs' context, timed here: the curve's points lie elsewhere."""
    from calibration.gpu import attention

    return attention.seconds(bench, batch, context(bench) + bench.block_length)


def interpolated(table: dict[float, float], x: float) -> float:
    """A table read linearly in log x; proportional beyond its ends, where work grows with x."""
    at = sorted(table)
    if x > at[-1]:
        return table[at[-1]] * x / at[-1]
    return float(np.interp(np.log(max(x, at[0])), np.log(at), [table[n] for n in at]))


# Routing -------------------------------------------------------------------------------------------------------------


def _hits(bench: Bench) -> dict[int, float]:
    """Distinct experts that a launch of so many tokens reaches, mean over layers and steps of a run."""
    found = {}
    for batch in batches(bench)[:: 2 if bench.on_cuda else 1]:
        with _counting(bench) as counted:
            run_point(_point(bench, "dense", batch, blocks=2), bench.model, threads=len(bench.retrieval_cores) or None)
        launches = int(counted["launches"])
        if launches:
            found[batch * bench.block_length] = float(counted["hit"]) / launches
    return found


@contextmanager
def _counting(bench: Bench) -> Iterator[dict[str, torch.Tensor]]:
    """Count experts behind every routing, inside the graphs too: on the device, read at the end."""
    from herald_exec.cuda import feed_forward
    from herald_exec.cuda.kernels.experts import route_tokens

    counted = {name: torch.zeros((), dtype=torch.int64, device=bench.device) for name in ("hit", "launches")}

    def route(logits: torch.Tensor, bias: torch.Tensor | None, moe: Any, counts: torch.Tensor) -> Any:
        found = route_tokens(logits, bias, moe, counts)
        counted["hit"] += (counts > 0).sum()
        counted["launches"] += 1
        return found

    with mock.patch.object(feed_forward, "route_tokens", route):
        yield counted


def routed(hits: dict[int, float], num_experts: int, per_token: int) -> float:
    """Share of tokens that would have to route independently for as many experts to be hit, median over sizes."""
    miss = 1 - per_token / num_experts
    shares = [
        float(np.log(1 - hit / num_experts) / np.log(miss)) / tokens
        for tokens, hit in hits.items()
        if 0 < hit < num_experts and 0 < miss < 1
    ]
    return min(1.0, statistics.median(shares)) if shares else 1.0


# The host's turn -----------------------------------------------------------------------------------------------------


def measure_turns(bench: Bench, part: Part) -> None:
    """What passes on the device between two steps while the host reads the outcome and issues the next one."""
    steps = short_steps(bench)
    for step in steps:
        part.rows.append(row_of(step.gap, case="between two steps", requests=step.batch))
    spread = round(max(step.gap.spread for step in steps), 4)
    x, y = tuple(float(step.batch) for step in steps), tuple(step.gap.seconds * 1e6 for step in steps)
    note = "the host reads what a step decided and issues the next one; median between steps of a block"
    part.values += [
        Value("engine.decide_overhead_us", "us", y, x, "requests", spread, note),
        Value(
            "engine.head_token_share",
            "share",
            steps[-1].head_share,
            note=f"the head runs on masked positions alone; mean over {min(_STEPS, bench.block_length)} steps",
        ),
    ]
