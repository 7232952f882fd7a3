"""Attention of a step by the executor's kernel over (requests, prefix), and torch's own beside it."""

import torch
from torch.nn import functional

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.gpu.graphs import timed
from calibration.parts.attention import joined
from calibration.timing import Work
from herald_pipeline.units import GB

SELECTED = 0.05
"""Budget of HERALD's selections: the lengths of sparse layers follow from it."""


def sizes(bench: Bench) -> tuple[tuple[int, int], ...]:
    """(requests, prefix): sparse layers at 16K and 32K, exact ones, and short prefixes.

    The longest is that of exact layers at the paper's batch, 80 requests of 32K.
    """
    if not bench.on_cuda:
        return ((1, 64), (2, 64), (2, 256))
    block = bench.block_length
    sparse = {context: int(SELECTED * context) + block for context in (16384, 32768)}
    short = ((1, 1024), (4, 1024), (16, 1024))
    selected = ((16, sparse[32768]), (40, sparse[32768]), (80, sparse[16384]), (80, sparse[32768]))
    full = ((4, 32768), (16, 16384), (16, 32768), (38, 32768), (80, 32768))
    return (*short, *selected, *full)


def measure(bench: Bench, part: Part, rate: float) -> None:
    """Share of the memory's read rate (``rate`` in GB/s) that the kernel reaches, over the bytes that it reads."""
    shape, block = bench.shape, bench.block_length
    points = sizes(bench)
    entry = 2 * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize
    kernel, torchs = _works(bench, points)
    timings = timed(bench, kernel)
    read = {}
    for rows, length in points:
        num_bytes = float(rows * (length + block) * entry)
        timing = timings[f"{rows}x{length}"]
        read[num_bytes] = min(1.0, num_bytes / timing.seconds / GB / rate)
        columns = {"rows": rows, "prefix": length, "bytes": num_bytes}
        part.rows.append(row_of(timing, case="kernel", **columns, gb_s=round(num_bytes / timing.seconds / GB, 2)))
    for name, timing in bench.time(torchs).items():
        rows, length = (int(text) for text in name.split("x"))
        num_bytes = float(rows * length * entry)
        columns = {"rows": rows, "prefix": length, "bytes": num_bytes}
        gb_s = round(num_bytes / timing.seconds / GB, 2)
        part.rows.append(row_of(timing, case="torch, prefix alone", **columns, gb_s=gb_s))
    at, share = joined(read)
    note = f"the executor's kernel, {block} queries x {shape.group_size} heads a KV head, {bench.dtype}"
    part.values.append(Value("engine.attention_efficiency", "share", share, at, "B", widest(timings.values()), note))


def _works(bench: Bench, points: tuple[tuple[int, int], ...]) -> tuple[dict[str, Work], dict[str, Work]]:
    """Cases of our kernel at every point, and of torch's at the largest sparse and full ones.

    All read the same two tensors, of which each takes what it needs: together they would not fit.
    """
    from herald_exec.cuda.forward import launch_shape
    from herald_exec.cuda.kernels.attention import attend_lanes

    shape, block = bench.shape, bench.block_length
    kv, dim = shape.num_kv_heads, shape.head_dim
    size = max(rows * (length + block) for rows, length in points) * kv * dim
    keys, values = (torch.empty(size, device=bench.device, dtype=bench.dtype).normal_() for _ in "kv")
    most = max(rows for rows, _ in points)
    q = bench.random(most, kv, block * shape.group_size, dim)
    own = tuple(bench.random(most, kv, block, dim) for _ in "kv")
    index = torch.arange(most, device=bench.device, dtype=torch.int32)
    kernel: dict[str, Work] = {}
    torchs: dict[str, Work] = {}
    compared = {max(points, key=lambda p: p[0] * p[1]), max(points, key=lambda p: (p[0], -p[1]))}
    for rows, length in points:
        dims = (rows, kv, length + block, dim)
        k, v = (part[: rows * kv * (length + block) * dim].view(dims) for part in (keys, values))
        lengths = torch.full((rows,), length, device=bench.device, dtype=torch.int32)
        given = (q[:rows], k, v, (own[0][:rows], own[1][:rows]), index[:rows], lengths)
        shaped = launch_shape(rows * kv, length + block)
        kernel[f"{rows}x{length}"] = lambda g=given, s=shaped: attend_lanes(*g, **s)  # type: ignore[misc]
        if (rows, length) in compared:
            parts = (q[:rows], k[:, :, :length], v[:, :, :length])
            torchs[f"{rows}x{length}"] = lambda p=parts: functional.scaled_dot_product_attention(*p)  # type: ignore[misc]
    return kernel, torchs


def seconds(bench: Bench, rows: int, length: int) -> float:
    """Seconds of one layer's attention of ``rows`` requests to ``length`` entries."""
    kernel, _ = _works(bench, ((rows, length),))
    (timing,) = timed(bench, kernel).values()
    return timing.seconds
