"""How long a cell will take, before it begins: its blocks, and what surrounds them.

With ``--hardware`` a block's time is the simulator's. Without, it is read from a table of rates that the first runs on
an H200 machine with 16 vCPUs gave; they serve a minute budget and nothing else. What filling the host's pool costs is
taken from the newest run of this process that filled one.
"""

from benchmarks.gpu.bench import FILL_GB_S, Bench
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.replicas import REPLICAS
from herald_pipeline import hardware_io
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate

GB = 1e9
_FETCH_GB_S, _LOCK_GB_S = 45.0, 2.4
"""Full KV over the link, and page-locking it before."""
_FETCHING = frozenset({"mage-offload", "layer-prefetch"})
_FIXED_S = {
    "rates": 4.0,
    "pool": 4.0,
    "step": 8.0,
    "attention": 11.0,
    "proxy": 12.0,
    "run": 2.0,
    "ceiling": 16.0,
    "replicas": 45.0,
    "sustained": 16.0,
}
"""Kinds: pools, graphs; for a ceiling also a process's start and drawing a model."""
_FIRST_S = 8.0
"""Drawing the model and compiling kernels, in the first run of a process."""
_HOST_GB_S = {"mage-cpu": 21, "step-fetch": 350, "infinigen": 350}
"""Full KV over what the host does with it; a proxy on the device leaves it a gather of a part."""
_HOST_METHODS_PER_STEP = frozenset({"cpu-exact", "step-fetch", "infinigen"})


def seconds(bench: Bench, cell: Cell) -> float:
    """Estimate for a cell; on the high side, because a budget must hold."""
    if not bench.on_cuda:
        return 0.0
    fixed = _FIXED_S[cell.kind] + (_FIRST_S if cell.kind == "run" and not bench.warm else 0.0)
    if cell.kind in ("rates", "attention", "proxy", "step", "sustained"):
        return fixed
    full_gb = cell.batch * cell.context * bench.shape.kv_bytes_per_token(bench.pipeline_dtype) / GB
    if cell.kind == "pool":
        return fixed + full_gb / bench.fill_gb_s
    if cell.kind == "ceiling":
        return fixed + (min(full_gb, 24.0) / bench.fill_gb_s if "kernel" in cell.what else 0.0)
    pipeline = bench.pipeline(cell)
    filled_gb = full_gb if keeps_on_host(pipeline) else 0.0
    if cell.kind == "replicas":
        count = int(cell.options.get("gpus", REPLICAS))
        alone_s = bench.blocks(cell) * block_seconds(bench, cell, full_gb)
        # All fill their pools at once, at a rate that one host gives; then one runs alone, then all, at half the rate.
        return fixed + count * full_gb / FILL_GB_S + alone_s * (1 + count)
    locked_s = full_gb / _LOCK_GB_S if cell.what in _FETCHING else 0.0
    return fixed + filled_gb / bench.fill_gb_s + locked_s + bench.blocks(cell) * block_seconds(bench, cell, full_gb)


def keeps_on_host(pipeline: Pipeline) -> bool:
    """Whether the full KV lies in host memory, which a run fills first."""
    return any(pool.name == "full" and pool.home is Home.DRAM for pool in pipeline.pools)


def block_seconds(bench: Bench, cell: Cell, full_gb: float) -> float:
    """Seconds of a block: predicted where there is a profile, else from bytes at rates of the first runs."""
    fetches = {"mage-offload": 1, "layer-prefetch": bench.steps(cell) + 1}.get(cell.what, 0)
    fetched_s = fetches * full_gb / min(_FETCH_GB_S, float(cell.options.get("link", _FETCH_GB_S)))
    if bench.args.hardware is None:
        return max(fetched_s, _by_rates(bench, cell, full_gb))
    profile = hardware_io.resolve(bench.args.hardware)
    block = bench.shape.block_length
    workload = Workload.uniform(
        cell.context, cell.batch, gen_tokens=3 * block, block_length=block, steps=bench.steps(cell)
    )
    predicted = simulate(bench.pipeline(cell), profile, workload, beyond_memory=True).block_time_s
    slower = max(1.0, 15 / float(cell.options.get("threads", 15)))
    return max(fetched_s, 1.15 * slower * (predicted or 0.0))


def _by_rates(bench: Bench, cell: Cell, full_gb: float) -> float:
    forwards = bench.steps(cell) + 1
    budget = float(cell.options.get("budget", 0.05))
    dense = cell.what == "dense"
    forward_s = 0.007 + 1e-4 * cell.batch + (full_gb / 3000 if dense else (0.1 + budget) * full_gb / 2000)
    if dense:
        return forwards * forward_s
    slower = max(1.0, 15 / float(cell.options.get("threads", 15)))
    scan_s = slower * full_gb / _HOST_GB_S.get(cell.what, 90)
    link_s = budget * full_gb / float(cell.options.get("link", 50))
    times = forwards if cell.what in _HOST_METHODS_PER_STEP else 1
    retrieval_s = times * (scan_s + link_s)
    beside = cell.what == "herald"
    return max(retrieval_s, forwards * forward_s) if beside else retrieval_s + forwards * forward_s
