"""Ceilings measured with the kernels' own threads: DRAM reads and copies."""

import statistics
import time

import numpy as np

from herald_pipeline.errors import CapacityError, ConfigError, check_number, raise_problems, unknown_name

from . import _core, kept
from .dispatch import tier_index
from .selection import check_threads, select
from .store import PagedKV

_PEAKS = {"fma": 0, "bf16_dot": 1, "amx": 2}
_TOKENS, _HEADS_A_THREAD, _LEAST_CALLS = 16384, 4, 3
"""Of the reference selection, which fits no cache; and is smaller than the memory that a sweep keeps for its pools."""


def _mapped(num_bytes: int) -> int:
    problem = check_number(num_bytes, "num_bytes", minimum=1 << 16, integer=True)
    if problem:
        raise ConfigError(problem)
    address = _core.map_memory(num_bytes)
    if not address:
        message = f"cannot map {num_bytes / 1e9:.2f} GB to measure; pass fewer num_bytes"
        raise CapacityError(message)
    return address


def read_bandwidth_gb_s(num_bytes: int, threads: int | None = None, repeats: int = 5) -> float:
    """Median rate in GB/s at which the active tier's widest loads read ``num_bytes`` once."""
    count = check_threads(threads)
    address = _mapped(num_bytes)
    try:
        _core.fill_normal(address, num_bytes // 2, 0, 1, count)
        seconds = [_core.read_seconds(tier_index(), address, num_bytes, count) for _ in range(repeats)]
    finally:
        _core.unmap_memory(address, num_bytes)
    return num_bytes / statistics.median(seconds) / 1e9


def pool_read_gb_s(pool: PagedKV, threads: int | None = None) -> float:
    """GB/s of one sequential read of a whole pool: the ceiling on the very memory that a kernel reads."""
    _ = pool.pages
    seconds = _core.read_seconds(tier_index(), pool.address, pool.nbytes, check_threads(threads))
    return pool.nbytes / seconds / 1e9


def kept_read_gb_s(num_bytes: int, parts: int, threads: int | None = None) -> list[float]:
    """GB/s of one read of each of ``parts`` equal stretches of what a closed pool left (:func:`keep_memory`).

    The layers of a pool lie one after another: this tells memory that reads slower from a kernel that does. Empty where
    fewer than ``num_bytes`` are kept.
    """
    problem = check_number(parts, "parts", minimum=1, integer=True)
    if problem:
        raise ConfigError(problem)
    count, memory, each = check_threads(threads), kept.held(), num_bytes // parts
    if memory is None or memory.nbytes < num_bytes or not each:
        return []
    starts = range(memory.address, memory.address + each * parts, each)
    return [each / _core.read_seconds(tier_index(), start, each, count) / 1e9 for start in starts]


def peak_gflops(unit: str, threads: int | None = None) -> float | None:
    """Measured GFLOP/s of one unit of the active tier (``"fma"``, ``"bf16_dot"``, ``"amx"``); None without it."""
    if unit not in _PEAKS:
        raise unknown_name("arithmetic unit", unit, _PEAKS)
    return _core.peak_flops(tier_index(), _PEAKS[unit], check_threads(threads)) / 1e9 or None


def widest_unit_tflop_s(threads: int | None = None) -> tuple[str, float] | None:
    """Name and measured TFLOP/s of the active tier's widest arithmetic, which selections of many queries use."""
    for unit in ("amx", "bf16_dot", "fma"):
        peak = peak_gflops(unit, threads)
        if peak is not None:
            return unit, peak / 1e3
    return None


def many_queries_gb_s(
    num_heads: int, num_kv_heads: int, head_dim: int, queries: int, threads: int | None = None, seconds: float = 0.3
) -> float:
    """GB/s of K and V that the work of ``queries`` queries a token would allow if reading took no time.

    What many queries reach moves with everything that a virtual machine shares: matrix units, caches, memory. No single
    one of them tells it. So this is a reference, to be measured beside what it is compared with: selections over
    requests of 16,384 tokens in memory of their own, bf16, four KV heads a thread, budget 5%, again and again for
    ``seconds`` behind a first call; of their median the time of a plain read of the same memory is taken away.
    """
    count = check_threads(threads)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "queries": queries}
    problems = [check_number(value, name, minimum=1, integer=True) for name, value in sizes.items()]
    raise_problems([*problems, check_number(seconds, "seconds", minimum=0.0)])
    most = (kept.LEAST_BYTES - 1) // (4 * head_dim * _TOKENS)
    rows = max(1, min(_HEADS_A_THREAD * count, most) // num_kv_heads)
    slots, lengths = np.arange(rows), np.full(rows, _TOKENS)
    q = np.random.default_rng(0).standard_normal((rows, queries, num_heads, head_dim), dtype=np.float32)
    k = np.full(rows, _TOKENS // 20)
    took: list[float] = []
    with PagedKV(1, rows, num_kv_heads, _TOKENS, head_dim, "bf16") as pool:
        pool.fill_normal(0, count)
        while len(took) < _LEAST_CALLS or sum(took) < seconds:
            begun = time.perf_counter()
            select(pool, 0, slots, lengths, q, k, threads=count)
            took.append(time.perf_counter() - begun)
        whole_s = statistics.median(took[1:])
        read_s = pool.nbytes / pool_read_gb_s(pool, count) / 1e9
        # Reading is a small part of it: were it not, the queries would not be many, and bound nothing.
        return pool.nbytes / max(whole_s - read_s, whole_s / 10) / 1e9


def memcpy_gb_s(num_bytes: int, threads: int | None = None, repeats: int = 5) -> float:
    """Median payload rate in GB/s of copying ``num_bytes`` (each byte is read and written once)."""
    count = check_threads(threads)
    source = _mapped(num_bytes)
    try:
        target = _mapped(num_bytes)
        try:
            _core.touch(source, num_bytes, count)
            _core.touch(target, num_bytes, count)
            seconds = [_core.copy_seconds(target, source, num_bytes, count) for _ in range(repeats)]
        finally:
            _core.unmap_memory(target, num_bytes)
    finally:
        _core.unmap_memory(source, num_bytes)
    return num_bytes / statistics.median(seconds) / 1e9
