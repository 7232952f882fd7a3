"""Selection on a GPU, as methods do that fetch the full KV: importance by the block's queries, top-k, gather."""

import torch

from calibration.bench import Bench, Part, Value, row_of, widest
from calibration.timing import Work
from herald_exec.pools import KV
from herald_exec.prefill import folded_importance, top_positions
from herald_pipeline.units import GB
from herald_pipeline.work import LOGIT_BYTES

BUDGET = 0.025
"""MAGE's."""


def prefixes(bench: Bench) -> tuple[int, ...]:
    """Prefix of one request: others follow it one by one."""
    return (1024, 4096, 16384, 32768) if bench.on_cuda else (64, 256)


def measure(bench: Bench, part: Part) -> None:
    """Share of the read rate over the bytes of a request's scores, as the description counts them."""
    rate = bench.rate("machine.gpu.bandwidth_gb_s", "attention")
    sizes = prefixes(bench)
    timings = bench.time({str(length): _case(bench, length) for length in sizes})
    shares = {}
    for length in sizes:
        size = 2.0 * length * bench.shape.num_kv_heads * LOGIT_BYTES
        timing = timings[str(length)]
        shares[size] = min(1.0, size / timing.seconds / GB / rate)
        part.rows.append(row_of(timing, case="top-k on the device", rows=1, context=length, bytes=size))
    at = tuple(sorted(shares))
    note = f"importance by {bench.block_length} queries, top-k and gather of one request, torch's operations"
    spread = widest(timings.values())
    part.values.append(Value("engine.top_k_efficiency", "share", tuple(shares[x] for x in at), at, "B", spread, note))


def _case(bench: Bench, length: int) -> Work:
    """One request of the step that selects, as the executor's action does it."""
    shape = bench.shape
    kv, dim, block = shape.num_kv_heads, shape.head_dim, bench.block_length
    q = bench.random(1, kv, block * shape.group_size, dim)
    prefix, own = (KV(*(bench.random(1, kv, n, dim) for _ in "kv")) for n in (length, block))
    count = max(1, int(BUDGET * length))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        selected = top_positions(folded_importance(q, prefix, own), count)
        index = selected[..., None].expand(-1, -1, -1, dim)
        return prefix.keys.gather(2, index), prefix.values.gather(2, index)

    return run
