"""How long a cell will take, before it begins: the simulator's block time, and what surrounds it."""

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import Cell
from herald_pipeline import hardware_io
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate

GB = 1e9
_FILL_GB_S = 12.0
"""Host memory is filled, and touched for the first time, at about this rate."""
_PLAIN_GB_S = 2.0
"""KV that the plain actions bring to the device one request and layer at a time."""
_START_S = {"rates": 8.0, "step": 8.0, "attention": 20.0, "run": 6.0, "ceiling": 25.0}
"""Kinds: drawing a model, compiling kernels, capturing graphs; for a ceiling a process's start as well."""


def seconds(bench: Bench, cell: Cell) -> float:
    """Estimate for a cell; on the high side, because a budget must hold."""
    fixed = _START_S[cell.kind] if bench.on_cuda else 0.0
    if cell.kind in ("rates", "attention", "step"):
        return fixed
    full_gb = cell.batch * cell.context * bench.shape.kv_bytes_per_token(bench.kv_dtype) / GB
    if cell.kind == "ceiling":
        return fixed + (min(full_gb, 24.0) / _FILL_GB_S if "kernel" in cell.what else 0.0)
    return fixed + full_gb / _FILL_GB_S + bench.blocks(cell) * block_seconds(bench, cell, full_gb)


def block_seconds(bench: Bench, cell: Cell, full_gb: float) -> float:
    """Seconds of a block: predicted where there is a profile, else from bytes at plain rates."""
    fetches = {"mage-offload": 1, "layer-prefetch": bench.steps(cell) + 1}.get(cell.what, 0)
    # These actions have no way of their own on a GPU yet, which the simulator does not know.
    plain = fetches * full_gb / _PLAIN_GB_S
    if bench.args.hardware is None:
        forwards = bench.steps(cell) + 1
        read_s = full_gb / 3000 if cell.what == "dense" else 0.05 * full_gb / 2000
        scan_s = 0.0 if cell.what == "dense" else full_gb / (20 if cell.what == "mage-cpu" else 70)
        times = forwards if cell.what in ("cpu-exact", "step-fetch", "infinigen") else 1
        return max(plain, times * scan_s + forwards * (0.02 + read_s))
    profile = hardware_io.resolve(bench.args.hardware)
    block = bench.shape.block_length
    workload = Workload.uniform(
        cell.context, cell.batch, gen_tokens=3 * block, block_length=block, steps=bench.steps(cell)
    )
    predicted = simulate(bench.pipeline(cell), profile, workload, beyond_memory=True).block_time_s
    return max(plain, 1.15 * (predicted or 0.0))
