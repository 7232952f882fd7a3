"""Attention of a denoise step, as the executor runs it, and the raw rate of device memory that it is a share of.

On a GPU one block of queries reads KV and hides its products, so the share of the read rate is measured with a block of
queries. A CPU core that plays the GPU computes longer than it reads: there the share is measured with one query, and
the share of the peak rate that the products of a block reach is measured beside it.
"""

import math
from dataclasses import replace

import torch

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.parts.gemm import peak_flops
from calibration.timing import Work
from herald_exec import kernels
from herald_exec.attention import attend_partial, merge
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB, MIB


def measure(bench: Bench) -> Part:
    """Raw read rate of device memory; then attention over (requests, prefix) at the model's heads."""
    from calibration.gpu import attention as attention_on_gpu

    part = Part("attention")
    rate, spread, note = device_read(bench, part)
    part.values.append(Value("machine.gpu.bandwidth_gb_s", "GB/s", rate, spread=spread, note=note))
    if bench.fused:
        attention_on_gpu.measure(bench, part, rate)
        return part
    shape, block = bench.shape, bench.block_length
    entry = 2 * shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.kv_dtype, shape.head_dim)
    points = [*((rows, keys) for keys in (64, 256, 1024, 4096) for rows in (1, 2)), (1, 8192)]
    if not bench.quick:
        points += [(8, 4096), (8, 16384)]
    queries = (block,) if bench.on_cuda else (1, block)
    cases = {(x, rows, keys): _case(bench, x, rows, keys) for x in queries for rows, keys in points}
    # Attention is most of a step at long contexts: twice the samples.
    many = replace(bench, plan=replace(bench.plan, repeats=2 * bench.plan.repeats))
    found = many.time({str(key): work for key, work in cases.items()})
    timings = {key: found[str(key)] for key in cases}
    peak = 0.0 if bench.on_cuda else peak_flops(bench)
    read: dict[float, float] = {}
    computed: dict[float, list[float]] = {}
    for (x, rows, keys), timing in timings.items():
        num_bytes = rows * (keys + block) * entry
        flops = 4.0 * rows * x * (keys + block) * shape.num_heads * shape.head_dim
        if x == queries[0]:
            read[num_bytes] = min(1.0, num_bytes / timing.seconds / GB / rate)
        if not bench.on_cuda and x == block:
            # By prefix, whatever the number of requests: their scores are what falls out of the caches.
            computed.setdefault(num_bytes / (rows * block), []).append(min(1.0, flops / timing.seconds / peak))
        columns = {"queries": x, "rows": rows, "prefix": keys, "bytes": num_bytes}
        rates = {"gb_s": round(num_bytes / timing.seconds / GB, 4), "gflop_s": round(flops / timing.seconds / GB, 2)}
        part.rows.append(row_of(timing, case="attention", **columns, **rates))
    spread = widest(timings.values())
    group = shape.group_size
    note = f"query heads a KV head: {group}, {bench.dtype}"
    at, share = joined(read)
    about = f"{queries[0]} queries a request, {note}"
    part.values.append(Value("engine.attention_efficiency", "share", share, at, "B", spread, about))
    if computed:
        at = tuple(sorted(computed))
        share = tuple(math.prod(computed[b]) ** (1 / len(computed[b])) for b in at)
        path, about = "engine.attention_flops_efficiency", f"{block} queries a request, {note}"
        part.values.append(Value(path, "share", share, at, "B/query", spread, about))
    return part


def joined(shares: dict[float, float], closer_than: float = 1.1) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The curve with neighbours of nearly the same bytes made one point, their geometric mean.

    Few requests with long prefixes and many with short ones move the same bytes at different rates; a curve over bytes
    can only lie between them.
    """
    groups: list[list[float]] = []
    for num_bytes in sorted(shares):
        if groups and num_bytes < closer_than * groups[-1][0]:
            groups[-1].append(num_bytes)
        else:
            groups.append([num_bytes])
    x = tuple(math.prod(group) ** (1 / len(group)) for group in groups)
    return x, tuple(math.prod(shares[b] for b in group) ** (1 / len(group)) for group in groups)


def _case(bench: Bench, queries: int, rows: int, keys: int) -> Work:
    """Attention to the prefix and to the block's own keys, joined: what a step does in every layer."""
    shape = bench.shape
    q = bench.random(rows, queries, shape.num_heads, shape.head_dim)
    k, v, own_k, own_v = (
        bench.random(rows, shape.num_kv_heads, length, shape.head_dim)
        for length in (keys, keys, bench.block_length, bench.block_length)
    )
    return lambda: merge(attend_partial(q, k, v), attend_partial(q, own_k, own_v))


def device_read(bench: Bench, part: Part) -> tuple[float, float, str]:
    """Raw rate in GB/s at which the device reads its memory, its spread, and how it was read."""
    if bench.on_cuda:
        # Much more than the second-level cache, and a copy beside the sum: the faster of the two is the raw rate.
        buffer = torch.ones(2048 * MIB // 4, device=bench.device)
        other = torch.empty_like(buffer)
        found = bench.time({"read": buffer.sum, "copy": lambda: other.copy_(buffer)})
        moved = {"read": buffer.nbytes, "copy": 2 * buffer.nbytes}
        best = max(found, key=lambda name: moved[name] / found[name].seconds)
        for name in moved.keys() - {best}:
            gb_s = round(moved[name] / found[name].seconds / GB, 3)
            part.rows.append(row_of(found[name], case=name, bytes=moved[name], gb_s=gb_s))
        timing, size = found[best], moved[best]
        note = f"{'sum over' if best == 'read' else 'copy of'} {buffer.nbytes / MIB:.0f} MiB of fp32"
    else:
        size = (64 if bench.quick else 512) * MIB
        threads = max(1, len(bench.main_cores))
        with kernels.PagedKV(1, 1, 1, size // (2 * 128 * 2), 128, "bf16") as pool:
            pool.fill_normal()
            timing = bench.time({"read": lambda: kernels.pool_read_gb_s(pool, threads)})["read"]
            size = pool.nbytes
        note = f"host memory, read by the {threads} core(s) that play the GPU"
    part.rows.append(row_of(timing, case="read", bytes=size, gb_s=round(size / timing.seconds / GB, 3)))
    return size / timing.seconds / GB, timing.spread, note
