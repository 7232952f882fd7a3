"""Copies over the link by size, direction and layout, both directions at once, and rows picked one by one.

On a machine without a GPU the executor's own copies are the link: up is a strided copy into a pool, down is an append
of blocks to the paged cache. Neither is a bus, and the profile says so.
"""

import torch

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.timing import Timing, Work
from herald_exec.kernels import PagedKV
from herald_pipeline.model import bytes_per_element
from herald_pipeline.units import GB, KIB, MIB


def measure(bench: Bench) -> Part:
    """Rates of contiguous copies over size; shares of layer-wise and of scattered ones."""
    part = Part("copies")
    large = [64 * MIB, 256 * MIB] if bench.on_cuda else [] if bench.quick else [64 * MIB, 512 * MIB]
    sizes = [16 * KIB, 128 * KIB, MIB, 8 * MIB, *large]
    up = {f"up {n}": _up(bench, n) for n in sizes}
    down = _downs(bench, sizes)
    layouts: dict[str, Work] = {"streamed": _streamed(bench, sizes[-1]), "scattered": _scattered(bench, sizes[-1])}
    cases = {**up, **down.cases, **layouts}
    timings = bench.time(cases) if bench.on_cuda else bench.time_host(cases)
    rates_up = _curve(part, "up", {n: n for n in sizes}, timings)
    rates_down = _curve(part, "down", down.num_bytes, timings)
    best = max(rates_up.values())
    for name in layouts:
        if name == "scattered" and bench.on_cuda:
            part.rows.append(row_of(timings[name], case="scattered, by a gather and a copy", bytes=sizes[-1]))
            continue  # the part gather times what the executor does there
        share = min(1.0, sizes[-1] / timings[name].seconds / GB / best)
        path = f"engine.{name}_copy_efficiency"
        part.values.append(Value(path, "share", share, spread=timings[name].spread, note=_NOTES[name]))
        part.rows.append(row_of(timings[name], case=name, bytes=sizes[-1], share=round(share, 4)))
    note = "pinned host memory" if bench.on_cuda else "into a pool, within host memory: no bus"
    down_note = (
        "pinned host memory" if bench.on_cuda else "blocks appended to the paged cache, within host memory: no bus"
    )
    spread = widest(timings.values())
    part.values += [
        Value("machine.link.h2d_gb_s", "GB/s", *_xy(rates_up), "B", spread, note),
        Value("machine.link.d2h_gb_s", "GB/s", *_xy(rates_down), "B", spread, down_note),
    ]
    if bench.on_cuda:
        duplex = _duplex(bench, sizes[-1])
        rate = 2 * sizes[-1] / duplex.seconds / GB
        part.rows.append(row_of(duplex, case="both directions", bytes=2 * sizes[-1], gb_s=round(rate, 3)))
        part.values.append(Value("machine.link.duplex_gb_s", "GB/s", rate, spread=duplex.spread))
    return part


_NOTES = {"streamed": "one layer a copy", "scattered": "rows of one head picked by index"}


def _xy(rates: dict[int, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    sizes = sorted(rates)
    return tuple(rates[n] for n in sizes), tuple(float(n) for n in sizes)


def _curve(part: Part, direction: str, num_bytes: dict[int, int], timings: dict[str, Timing]) -> dict[int, float]:
    rates = {}
    for n, size in num_bytes.items():
        timing = timings[f"{direction} {n}"]
        rates[size] = size / timing.seconds / GB
        part.rows.append(row_of(timing, case=direction, bytes=size, gb_s=round(rates[size], 4)))
    return rates


def _host(bench: Bench, size: int) -> torch.Tensor:
    return torch.zeros(size // 4, dtype=torch.float32, pin_memory=bench.on_cuda)


def _up(bench: Bench, size: int) -> Work:
    """``size`` bytes to the device: contiguous on CUDA; rows of a pool without."""
    if bench.on_cuda:
        source, target = _host(bench, size), torch.zeros(size // 4, device=bench.device)
        return lambda: target.copy_(source, non_blocking=True)
    heads, dim = bench.shape.num_kv_heads, bench.shape.head_dim
    entries = max(1, size // (2 * heads * dim * 4))
    rings = [torch.zeros(1, heads, entries, dim) for _ in range(2)]
    pool = [torch.zeros(1, heads, 2 * entries, dim) for _ in range(2)]

    def run() -> None:
        for ring, store in zip(rings, pool, strict=True):
            store[:, :, :entries] = ring

    return run


class _Downs:
    """Cases of copies to the host and the bytes that each moves."""

    def __init__(self) -> None:
        self.cases: dict[str, Work] = {}
        self.num_bytes: dict[int, int] = {}
        self.pools: list[PagedKV] = []


def _downs(bench: Bench, sizes: list[int]) -> _Downs:
    """To the host: contiguous on CUDA; without, whole blocks appended to the paged cache."""
    found = _Downs()
    if bench.on_cuda:
        for n in sizes:
            source, target = torch.zeros(n // 4, device=bench.device), _host(bench, n)
            found.cases[f"down {n}"] = lambda s=source, t=target: t.copy_(s, non_blocking=True)  # type: ignore[misc]
            found.num_bytes[n] = n
        return found
    shape, block = bench.shape, bench.block_length
    entry = 2 * shape.num_kv_heads * shape.head_dim * bytes_per_element(bench.kv_dtype, shape.head_dim)
    for layers in (2, 8, 32):
        size = round(layers * block * entry)
        pool = PagedKV(layers, 1, shape.num_kv_heads, 4 * block, shape.head_dim, str(bench.dram_kv_dtype))
        found.pools.append(pool)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[str(bench.dram_kv_dtype)]
        kv = torch.zeros(layers, 2, shape.num_kv_heads, block, shape.head_dim)

        def run(pool: PagedKV = pool, kv: torch.Tensor = kv, layers: int = layers, dtype: torch.dtype = dtype) -> None:
            for layer in range(layers):
                k, v = (kv[layer, i].transpose(0, 1).to(dtype) for i in range(2))
                pool.append(layer, 0, block, k, v)

        found.cases[f"down {size}"] = run
        found.num_bytes[size] = size
    return found


def _streamed(bench: Bench, size: int) -> Work:
    """The same bytes in as many copies as the model has layers."""
    layers = bench.shape.num_layers
    source, target = _host(bench, size), torch.zeros(size // 4, device=bench.device)
    pieces = list(zip(source.chunk(layers), target.chunk(layers), strict=True))

    def run() -> None:
        for host, device in pieces:
            device.copy_(host, non_blocking=bench.on_cuda)

    return run


def _scattered(bench: Bench, size: int) -> Work:
    """Rows of one KV head, picked by a random index in host memory, to the device."""
    dim, dtype = bench.shape.head_dim, bench.dtype
    rows = size // (dtype.itemsize * dim)
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(4 * rows, generator=generator)[:rows].sort().values
    source = torch.zeros(4 * rows, dim, dtype=dtype)
    staging = torch.zeros(rows, dim, dtype=dtype, pin_memory=bench.on_cuda)
    target = torch.zeros(rows, dim, dtype=dtype, device=bench.device)

    def run() -> None:
        torch.index_select(source, 0, index, out=staging)
        target.copy_(staging, non_blocking=bench.on_cuda)

    return run


def _duplex(bench: Bench, size: int) -> Timing:
    """Both directions at once, on two streams of the device."""
    up, down = (torch.cuda.Stream(bench.device) for _ in range(2))  # type: ignore[no-untyped-call]
    host_up, host_down = _host(bench, size), _host(bench, size)
    device_up, device_down = (torch.zeros(size // 4, device=bench.device) for _ in range(2))

    def run() -> None:
        current = torch.cuda.current_stream(bench.device)
        for stream in (up, down):
            stream.wait_stream(current)
        with torch.cuda.stream(up):
            device_up.copy_(host_up, non_blocking=True)
        with torch.cuda.stream(down):
            host_down.copy_(device_down, non_blocking=True)
        for stream in (up, down):
            current.wait_stream(stream)

    return bench.time({"both": run})["both"]
