"""Attention of a denoise step, as the executor runs it, and the raw rate of device memory that it is a share of.

The share is measured with one block of queries a request. On a GPU attention then reads KV and hides its products; a
CPU core that plays the GPU computes longer than it reads, so there the share says how much of the read rate is left.
"""

from dataclasses import replace

import torch

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.timing import Work
from herald_exec import kernels
from herald_exec.attention import attend_partial, merge
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB, MIB


def measure(bench: Bench) -> Part:
    """Raw read rate of device memory; then attention over (requests, prefix) at the model's heads."""
    part = Part("attention")
    rate, spread, note = device_read(bench, part)
    part.values.append(Value("machine.gpu.bandwidth_gb_s", "GB/s", rate, spread=spread, note=note))
    shape, block = bench.shape, bench.block_length
    entry = 2 * shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.kv_dtype, shape.head_dim)
    points = [*((rows, keys) for keys in (64, 256, 1024, 4096) for rows in (1, 2)), (1, 8192)]
    if not bench.quick:
        points += [(8, 4096), (8, 16384)]

    def case(rows: int, keys: int) -> Work:
        q = bench.random(rows, block, shape.num_heads, shape.head_dim)
        k, v, own_k, own_v = (
            bench.random(rows, shape.num_kv_heads, length, shape.head_dim) for length in (keys, keys, block, block)
        )
        # The prefix and the block's own keys, joined: what a step does in every layer.
        return lambda: merge(attend_partial(q, k, v), attend_partial(q, own_k, own_v))

    cases = {f"{rows}x{keys}": case(rows, keys) for rows, keys in points}
    # Attention is most of a step at long contexts: twice the samples.
    timings = replace(bench, plan=replace(bench.plan, repeats=2 * bench.plan.repeats)).time(cases)
    curve: dict[float, float] = {}
    for rows, keys in points:
        timing = timings[f"{rows}x{keys}"]
        num_bytes = rows * (keys + block) * entry
        share = num_bytes / timing.seconds / GB / rate
        curve[num_bytes] = min(1.0, share)
        flops = 4.0 * rows * block * (keys + block) * shape.num_heads * shape.head_dim
        columns = {"rows": rows, "prefix": keys, "bytes": num_bytes, "gb_s": round(num_bytes / timing.seconds / GB, 4)}
        part.rows.append(row_of(timing, case="attention", **columns, gflop_s=round(flops / timing.seconds / GB, 2)))
    x = tuple(sorted(curve))
    group = shape.group_size
    part.values.append(
        Value(
            "engine.attention_efficiency",
            "share",
            tuple(curve[b] for b in x),
            x,
            "B",
            widest(timings.values()),
            f"{block} queries a request, {group} query heads a KV head, {bench.dtype}",
        )
    )
    return part


def device_read(bench: Bench, part: Part) -> tuple[float, float, str]:
    """Raw rate in GB/s at which the device reads its memory, its spread, and how it was read."""
    if bench.on_cuda:
        buffer = torch.ones(1024 * MIB // 4, device=bench.device)
        timing = bench.time({"read": buffer.sum})["read"]
        size = buffer.nbytes
        note = f"sum over {size / MIB:.0f} MiB of fp32"
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
