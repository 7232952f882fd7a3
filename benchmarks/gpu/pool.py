"""The host's pool as memory: how fast each layer of it can be read at all, and on how large pages it lies.

A run's selections differ from layer to layer; this cell says how much of that is the memory's own. It comes behind a
run of the same size, whose memory it begins with.
"""

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import Cell
from herald_exec.kernels import PagedKV, _core
from herald_exec.kernels.dispatch import tier_index

GB = 1e9
_REPEATS = 3


def pool(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Median rate of reading each layer once, all layers, and the share of the mapping in huge pages."""
    shape, threads = bench.shape, bench.threads(cell)
    tokens = cell.context + shape.block_length * bench.blocks(cell)
    kv = PagedKV(shape.num_layers, cell.batch, shape.num_kv_heads, tokens, shape.head_dim, bench.kv_dtype)
    try:
        kv.fill_normal(0, threads)
        layer_bytes, rates = kv.pages.strides[0], {}
        for layer in range(shape.num_layers):
            at = kv.address + layer * layer_bytes
            seconds = [_core.read_seconds(tier_index(), at, layer_bytes, threads or 0) for _ in range(_REPEATS)]
            rates[layer] = layer_bytes / median(seconds) / GB
        mapped = smaps(kv.address)
    finally:
        kv.close()
    found = {"context": cell.context, "batch": cell.batch, "pool_gb": shape.num_layers * layer_bytes / GB}
    found |= {"gb_s": len(rates) / sum(1 / rate for rate in rates.values()), "layer_gb_s": rates}
    if mapped.get("Rss"):
        found["huge_pages_share"] = mapped.get("AnonHugePages", 0) / mapped["Rss"]
    return found


def smaps(address: int) -> dict[str, int]:
    """What the kernel says of the mapping that holds ``address``: name -> KiB; empty where it says nothing."""
    path, found, inside = Path("/proc/self/smaps"), {}, False
    if not path.exists():
        return {}
    for line in path.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and rest[-1:] == ["kB"]:
            found[first.rstrip(":")] = int(rest[0])
    return found
