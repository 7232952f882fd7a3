"""A second copy of the keys in 8 bits, for scoring: a quarter of the bytes of K and V that a scan reads.

Each channel of K is divided by a power of two (the queries are multiplied by it), then each row by its own scale, the
largest magnitude over 127, and rounded. A selection scans these and ranks positions by 8-bit scores. With
``candidates`` c, the first budget / c are selected; the ranks from there to c x budget, the border, are scored again
from K, and the best of them fill the budget. The heaviest eighth of the first is scored again too: they make most of
the softmax's denominators. The output comes from the selected entries' V, as with ``key_only``. Beyond the paper.

What is exact. Scores, weights and order at the border are those of K. On 8-bit scores rest which positions are at the
border, the denominators elsewhere, and the weights in the output of positions above the border that are not among the
heaviest (``rescore_all`` scores these again too, at twice the reading). A score is off by at most
``scale / 2 * sum |q|`` (scaled queries; these are rounded to 16 bits, 256 times finer); a position is lost only if it
is off by the distance from rank k to the end of the border. The definition in :mod:`.reference` does the same in
float64, and kernels agree with it as closely as without 8-bit keys; only positions whose 8-bit importance ties with an
end of what is scored again (to 1e-4) may be scored again or not.

How many candidates. Positions lost of 819 (5% of 16,384, groups of 4 queries, the worst of 4 heads, two draws each)
with c = 1.0, 1.05, 1.1 and 1.25: unit normals 11, 1, 1, 1; with two channels 8 times as wide about a mean of 24
9, 2, 0, 0, and 20 times as wide about 60 16, 3, 2, 2; with every candidate scored again 11, 1, 1, 1, then 9, 2, 1, 1,
and 16, 3, 1, 1. So c = 1.1 is the default; what is left is near-ties that turn with the denominators. Outputs are off
by at most 0.012 of the largest where no position is lost. Without channel factors some hundred are lost with such
channels.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from herald_pipeline.errors import CapacityError, ConfigError, RunError

from . import _core
from .store import PAGE_TOKENS, PagedKV, freed_with


class Int8Keys:
    """8-bit keys of every position of a pool, kept in step by :meth:`update`.

    Parameters
    ----------
    pool
        Whose K is copied; must stay open. Nothing is copied yet.

    Raises
    ------
    CapacityError
        The address space does not hold the copy.
    """

    def __init__(self, pool: PagedKV) -> None:
        self.pool = pool
        self.row_bytes = -(-pool.head_dim // 32) * 32
        tile = PAGE_TOKENS * (self.row_bytes + 4)
        self._header = -(-pool.head_dim * 4 // 64) * 64
        head = self._header + pool.pages_per_slot * tile
        slot = pool.num_kv_heads * head
        self.nbytes = pool.num_layers * pool.num_slots * slot
        self.address = _core.map_memory(self.nbytes)
        if not self.address:
            message = f"the 8-bit keys of {self.nbytes / 1e9:.1f} GB cannot be mapped; select without them"
            raise CapacityError(message)
        self._free = freed_with(self, _core.unmap_memory, self.address, self.nbytes)
        self._view = _core.View(
            self.address + self._header,
            self.address,
            tile,
            head,
            slot,
            pool.num_slots * slot,
            pool.capacity_tokens,
            0,
            pool.head_dim,
            pool.num_kv_heads,
            pool.num_slots,
            pool.num_layers,
        )

    @property
    def view(self) -> _core.View:
        """Addresses and strides for the extension."""
        if not self.address:
            message = "the 8-bit keys are closed; make a new Int8Keys"
            raise RunError(message)
        return self._view

    def update(self, layer: int, slot: int, start: int, stop: int, threads: int | None = None) -> None:
        """Copy positions ``[start, stop)`` of the pool: call it after each append.

        A slot's first update, and every one from 0 on (a new request), fixes its channel factors.
        """
        self.pool.check_place(layer, slot, start, stop)
        _core.quantise(self.pool.view, self.view, layer, slot, start, stop, threads or 0)

    def read(
        self, layer: int, slot: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Copies of rows ``[tokens, kv_heads, head_dim]`` and their scales ``[tokens, kv_heads]``.

        K is about rows times scales times :meth:`channels`.
        """
        self.pool.check_place(layer, slot, start, stop)
        heads, pages = self.pool.num_kv_heads, self.pool.pages_per_slot
        tiles = self._heads(layer, slot)[:, self._header :].reshape(heads, pages, -1)
        rows = tiles[..., : PAGE_TOKENS * self.row_bytes].reshape(heads, pages * PAGE_TOKENS, self.row_bytes)
        scales = tiles[..., PAGE_TOKENS * self.row_bytes :].copy().view(np.float32).reshape(heads, pages * PAGE_TOKENS)
        part = slice(start, stop)
        return rows[:, part, : self.pool.head_dim].swapaxes(0, 1).copy(), scales[:, part].T.copy()

    def channels(self, layer: int, slot: int) -> npt.NDArray[np.float32]:
        """Powers of two that each channel was divided by, ``[kv_heads, head_dim]``; zeros before the first update."""
        self.pool.check_place(layer, slot, 0, 0)
        header = self._heads(layer, slot)[:, : self.pool.head_dim * 4]
        return header.copy().view(np.float32)

    def _heads(self, layer: int, slot: int) -> npt.NDArray[np.int8]:
        _ = self.view
        memory = memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")
        shape = (self.pool.num_layers, self.pool.num_slots, self.pool.num_kv_heads, -1)
        found: npt.NDArray[np.int8] = np.frombuffer(memory, np.int8).reshape(shape)[layer, slot]
        return found

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self.address:
            self.address = 0
            self._free()


def check_keys8(keys8: Int8Keys | None, store: object, *, refused: bool) -> Any:
    """The view of 8-bit keys that belong to ``store``; ``refused`` when the options rule them out."""
    if keys8 is None:
        return None
    if keys8.pool is not store:
        message = "keys8 must be the 8-bit keys of the store that is selected from; pass Int8Keys(store)"
        raise ConfigError(message)
    if refused:
        message = "8-bit keys rank single positions by exact scores; drop smoothing, paper_like or keys8"
        raise ConfigError(message)
    return keys8.view
