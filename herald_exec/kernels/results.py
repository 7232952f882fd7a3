"""Memory of results that nobody holds any more, used again.

Selections run layer after layer with results of the same few shapes. An array of some hundred KiB comes from the system
each time it is made, and its pages fault in under the kernels' threads: at 4K and 8 queries that was a twelfth of a
selection's time.
"""

import math
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 1 << 16
"""Smaller arrays come from memory that the process has already."""
MOST_KEPT = 128
"""More than the layers whose selections are held from one block to the next, twice."""

_kept: list[npt.NDArray[np.uint8]] = []
_lock = threading.Lock()


def _references(held: list[npt.NDArray[np.uint8]], at: int) -> int:
    return sys.getrefcount(held[at])


_ALONE = _references([np.empty(1, np.uint8)], 0)  # of memory that no array is a view of


def empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """``np.empty``, in the memory of an earlier result where every view of that is gone."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < LEAST_BYTES:
        return np.empty(shape, dtype)
    with _lock:
        memory = _free(nbytes)
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
            if len(_kept) == MOST_KEPT:
                _drop_one()
            if len(_kept) < MOST_KEPT:
                _kept.append(memory)
        found: npt.NDArray[Any] = memory[:nbytes].view(dtype).reshape(shape)
        return found


def _free(nbytes: int) -> npt.NDArray[np.uint8] | None:
    """Kept memory without an owner, of at least as many bytes and less than twice as many."""
    for at in range(len(_kept)):
        if nbytes <= _kept[at].nbytes < 2 * nbytes and _references(_kept, at) == _ALONE:
            return _kept[at]
    return None


def _drop_one() -> None:
    """Forget the oldest that is free: of a shape that is no longer asked for."""
    for at in range(len(_kept)):
        if _references(_kept, at) == _ALONE:
            del _kept[at]
            return
