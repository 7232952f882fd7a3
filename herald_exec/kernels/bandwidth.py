"""Ceilings measured with the kernels' own threads: DRAM reads and copies."""

import statistics

from herald_pipeline.errors import CapacityError, ConfigError, check_number, unknown_name

from . import _core, kept
from .dispatch import tier_index
from .selection import check_threads
from .store import PagedKV

_PEAKS = {"fma": 0, "bf16_dot": 1, "amx": 2}


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
