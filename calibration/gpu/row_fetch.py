"""Rows of paged KV in page-locked host memory, read by the device as ``gather=gpu`` does."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from calibration.bench import Bench
from calibration.timing import Timing, Work
from herald_exec import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calibration.other_gathers import Rows


def timings(bench: Bench, pool: kernels.PagedKV, sizes: "Mapping[str, Rows]") -> dict[str, Timing]:
    """Time of each size's rows, from ``pool`` into a pool on the device; indices are there already."""
    with page_locked(pool):
        return bench.time({name: case(bench, rows) for name, rows in sizes.items()})


@contextmanager
def page_locked(pool: kernels.PagedKV) -> "Iterator[None]":
    """The pool's pages as the device can read them; unlocked when nothing reads them any more."""
    if not torch.cuda.is_available():
        yield
        return
    from herald_exec.cuda.fetched import page_lock

    locked = page_lock(pool.address, pool.nbytes)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(locked)  # type: ignore[no-untyped-call]


def case(bench: Bench, rows: "Rows") -> Work:
    """One fetch of these rows into a pool on the device."""
    from herald_exec.cuda.kernels.rows import fetch_rows

    count, heads, k = rows.indices.shape
    dims = (count, heads, k, rows.pool.head_dim)
    target = tuple(torch.zeros(dims, dtype=bench.dtype, device=bench.device) for _ in "kv")
    told = np.array([rows.slots, range(count), [k] * count], np.int32)
    on_device = torch.from_numpy(told).to(bench.device)
    indices = torch.from_numpy(rows.indices).to(bench.device)
    _, *strides = rows.pool.pages.strides[:3]
    return lambda: fetch_rows(rows.pool.address, on_device, indices, (target[0], target[1]), *strides)
