"""Attention of a step by the executor's kernel over (requests, prefix), and torch's own beside it.

A step reads each layer's KV once, from a pool that fills device memory. So the layers of a pass lie apart here as well:
the same few megabytes again would come from the second-level cache, and the same few gigabytes are translated faster
than a whole pool. What the kernel's products reach is the most that any number of requests shows at a prefix; two
blocks of a row, as in a draft step, share what is read, and are twice the products for it.
"""

from itertools import accumulate

import torch
from torch.nn import functional

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.gpu.graphs import timed
from calibration.parts.attention import joined
from calibration.parts.gemm import peak_flops
from calibration.timing import Timing, Work
from herald_pipeline.units import GB

SELECTED = 0.05
"""Budget of HERALD's selections: the lengths of sparse layers follow from it."""
_POOL_BYTES = 48e9
"""KV that a pass may lie in: more than the device translates addresses of without looking them up."""


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
    pool = Pool(bench, points)
    count = {point: pool.layers(*point) for point in points}
    draft = max(points, key=lambda point: (point[0], -point[1]))
    cases = {f"{rows}x{length}": pool.work(rows, length) for rows, length in points}
    timings = timed(bench, {**cases, "draft": pool.work(*draft, lanes=2)})
    read = {}
    for rows, length in points:
        num_bytes = float(rows * (length + block) * entry)
        timing = timings[f"{rows}x{length}"]
        gb_s = num_bytes * count[rows, length] / timing.seconds / GB
        read[num_bytes] = min(1.0, gb_s / rate)
        columns = {"rows": rows, "prefix": length, "bytes": num_bytes, "layers": count[rows, length]}
        part.rows.append(row_of(timing, case="kernel", **columns, gb_s=round(gb_s, 2)))
    compared = {max(points, key=lambda point: point[0] * point[1]), draft}
    for name, timing in bench.time(
        {f"{rows}x{length}": pool.torchs(rows, length) for rows, length in compared}
    ).items():
        rows, length = (int(text) for text in name.split("x"))
        num_bytes = float(rows * length * entry)
        columns = {"rows": rows, "prefix": length, "bytes": num_bytes}
        gb_s = round(num_bytes / timing.seconds / GB, 2)
        part.rows.append(row_of(timing, case="torch, prefix alone", **columns, gb_s=gb_s))
    at, share = joined(read)
    note = f"the executor's kernel, {block} queries x {shape.group_size} heads a KV head, {bench.dtype}"
    part.values.append(Value("engine.attention_efficiency", "share", share, at, "B", widest(timings.values()), note))
    part.values.append(_computing(bench, part, draft, count, timings))


def _computing(
    bench: Bench, part: Part, draft: tuple[int, int], count: dict[tuple[int, int], int], timings: dict[str, Timing]
) -> Value:
    """Share of the peak rate that the kernel's products reach, over KV bytes a query token: the second roof.

    Where reading binds, or launches do, products could have been faster; so of all cases with as long a prefix, or a
    shorter one, the fastest counts.
    """
    shape, block = bench.shape, bench.block_length
    entry = 2 * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize
    peak, reached = peak_flops(bench), dict[float, float]()
    for (rows, length), layers in count.items():
        for lanes in (1, 2) if (rows, length) == draft else (1,):
            timing = timings["draft" if lanes > 1 else f"{rows}x{length}"]
            tokens, pairs = lanes * rows * block, lanes * rows * block * (length + block)
            flops = 4.0 * pairs * shape.num_heads * shape.head_dim * layers
            # As the description counts them: what is read once, and each block's own entries.
            at = (rows * length + tokens) * entry / tokens
            reached[at] = max(reached.get(at, 0.0), min(1.0, flops / timing.seconds / peak))
    timing = timings["draft"]
    columns = {"rows": draft[0], "prefix": draft[1], "layers": count[draft]}
    part.rows.append(row_of(timing, case="kernel, two blocks a row", **columns))
    x = tuple(sorted(reached))
    note = f"most of any number of requests; {draft[0]} x {draft[1]} with two blocks a row"
    path, spread = "engine.attention_flops_efficiency", widest(timings.values())
    return Value(path, "share", tuple(accumulate((reached[at] for at in x), max)), x, "B/query", spread, note)


class Pool:
    """KV of a whole pass: its layers lie as far apart as memory allows, and overlap only where they are too large."""

    def __init__(self, bench: Bench, points: tuple[tuple[int, int], ...]) -> None:
        shape, block = bench.shape, bench.block_length
        self._bench, self._most = bench, max(rows for rows, _ in points)
        self._entry = shape.num_kv_heads * shape.head_dim
        largest = max(rows * (length + block) for rows, length in points) * self._entry
        room = min(_POOL_BYTES, _free_bytes(bench) / 2) if bench.on_cuda else 0.0
        self._size = max(largest, int(room / 2 / bench.dtype.itemsize))
        self._parts = tuple(torch.empty(self._size, device=bench.device, dtype=bench.dtype).normal_() for _ in "kv")
        dims = (2 * self._most, shape.num_kv_heads)
        self._q = bench.random(*dims, block * shape.group_size, shape.head_dim)
        self._own = tuple(bench.random(*dims, block, shape.head_dim) for _ in "kv")
        self._index = torch.arange(self._most, device=bench.device, dtype=torch.int32)

    def layers(self, rows: int, length: int) -> int:
        """Layers that a pass reads: those of the model, or as many as do not overlap."""
        needed = rows * (length + self._bench.block_length) * self._entry
        return max(1, min(self._bench.shape.num_layers, self._size // needed))

    def _layer(self, rows: int, length: int, layer: int) -> list[torch.Tensor]:
        dims = (rows, self._bench.shape.num_kv_heads, length + self._bench.block_length, self._bench.shape.head_dim)
        needed = dims[0] * dims[1] * dims[2] * dims[3]
        # Places of a pass are multiples of 64 elements: what the kernel loads at once begins where it may.
        begin = layer * (self._size // self.layers(rows, length) // 64) * 64
        return [part[begin : begin + needed].view(dims) for part in self._parts]

    def work(self, rows: int, length: int, lanes: int = 1, most: int | None = None) -> Work:
        """A pass of our kernel, of ``most`` layers; with two ``lanes`` a row, the block and its draft, side by side."""
        from herald_exec.cuda.forward import launch_shape
        from herald_exec.cuda.kernels.attention import attend_lanes

        count = lanes * rows
        index = self._index[:rows].repeat(lanes)
        lengths = torch.full((count,), length, device=self._bench.device, dtype=torch.int32)
        queries, own = self._q[:count], (self._own[0][:count], self._own[1][:count])
        shaped = launch_shape(count * self._bench.shape.num_kv_heads, length + self._bench.block_length)
        passes = [self._layer(rows, length, layer) for layer in range(self.layers(rows, length))][:most]

        def run() -> None:
            for keys, values in passes:
                attend_lanes(queries, keys, values, own, index, lengths, paired=lanes > 1, **shaped)

        return run

    def torchs(self, rows: int, length: int) -> Work:
        """Torch's own kernel over one layer's prefix."""
        keys, values = (part[:, :, :length] for part in self._layer(rows, length, 0))
        queries = self._q[:rows]
        return lambda: functional.scaled_dot_product_attention(queries, keys, values)


def _free_bytes(bench: Bench) -> float:
    """What torch holds back of earlier pools is free as well."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(bench.device)
    return float(free)


def seconds(bench: Bench, rows: int, length: int) -> float:
    """Seconds of one layer's attention of ``rows`` requests to ``length`` entries."""
    pool = Pool(bench, ((rows, length),))
    (timing,) = timed(bench, {"": pool.work(rows, length)}).values()
    return timing.seconds / pool.layers(rows, length)
