"""KV in host memory as the kernels read it: pages of 64 tokens, or plain ``[S, d]`` arrays.

Layout of a page of one (layer, slot, KV head): the K tile ``[64, d]``, then the V tile ``[64, d]``, both row-major, and
the pages of one (layer, slot, head) follow each other. Why (``x`` = queries per row):

- One sequential stream for attention: tile-interleaved pages are 2-7% faster than separate K and V arrays at x = 1.
- Rows stay contiguous, so the gather reads 2 x d elements per token and not a strided half of twice as many.
- V interleaved in pairs of rows would spare the matrix-tile kernel (x >= 2) its in-register interleave, 2-7% of its
  time at x = 32 on Emerald Rapids. It brings nothing to the vector kernel at x = 1, which is what HERALD runs, and
  makes every gathered V row cost two rows of DRAM traffic.
- Transposed K would make a gathered row touch d cache lines; it is never used.
"""

import ctypes
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from herald_pipeline.errors import CapacityError, ConfigError, RunError, check_number, raise_problems, unknown_name

from . import _core, kept
from .elements import DTYPES, STORAGE, Array, as_storage

PAGE_TOKENS = 64


def _check_shape(sizes: dict[str, int], dtype: str) -> None:
    raise_problems(check_number(value, name, minimum=1, integer=True) for name, value in sizes.items())
    if dtype not in DTYPES:
        raise unknown_name("KV dtype", dtype, DTYPES)
    if sizes["head_dim"] % 8 or sizes["head_dim"] > 256:
        message = f"head_dim must be a multiple of 8 up to 256, got {sizes['head_dim']}"
        raise ConfigError(message)
    if sizes["capacity_tokens"] > 2**31 - 2**12:
        message = f"capacity_tokens must be below 2^31 - 4096 (positions are 32-bit), got {sizes['capacity_tokens']}"
        raise ConfigError(message)


def freed_with(owner: object, free: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """What frees memory, once: when it is called, or when its owner is gone without.

    Not as the interpreter ends: modules are torn down then, threads may still read, and the system takes the memory.
    """
    freeing = weakref.finalize(owner, free, *arguments)
    freeing.atexit = False
    return freeing


class PagedKV:
    """Pages of 64 tokens in one allocation, on huge pages where the system grants them.

    Memory is touched only when written, so a pool costs what it holds. Lengths are the caller's: the kernels take them.

    Parameters
    ----------
    num_layers, num_slots, num_kv_heads
        Extents; a slot holds one request.
    capacity_tokens
        Tokens a slot can hold; rounded up to whole pages.
    head_dim
        Elements per row, a multiple of 8 up to 256.
    dtype
        ``"bf16"``, ``"fp16"`` or ``"fp32"``.

    Raises
    ------
    CapacityError
        The address space or the system's limit does not hold the pool.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        capacity_tokens: int,
        head_dim: int,
        dtype: str = "bf16",
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_slots": num_slots,
            "num_kv_heads": num_kv_heads,
            "capacity_tokens": capacity_tokens,
            "head_dim": head_dim,
        }
        _check_shape(sizes, dtype)
        self.num_layers, self.num_slots, self.num_kv_heads = num_layers, num_slots, num_kv_heads
        self.head_dim, self.dtype = head_dim, dtype
        self.pages_per_slot = -(-capacity_tokens // PAGE_TOKENS)
        self.capacity_tokens = self.pages_per_slot * PAGE_TOKENS
        storage = STORAGE[dtype]
        tile = PAGE_TOKENS * head_dim * storage.itemsize
        head = self.pages_per_slot * 2 * tile
        slot, layer = num_kv_heads * head, num_slots * num_kv_heads * head
        #: Bytes of the whole pool, and where it starts: what a CUDA host registers as pinned.
        self.nbytes = num_layers * layer
        memory = kept.take(self.nbytes)
        if memory is None:
            message = (
                f"the KV pool of {self.nbytes / 1e9:.1f} GB ({num_layers} layers x {num_slots} slots x "
                f"{num_kv_heads} heads x {self.capacity_tokens} tokens) cannot be mapped; "
                "lower the batch or the context"
            )
            raise CapacityError(message)
        self._memory, self.address = memory, memory.address
        self._free = freed_with(self, kept.give, memory)
        shape = (num_layers, num_slots, num_kv_heads, self.pages_per_slot, 2, PAGE_TOKENS, head_dim)
        whole = memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")
        self._pages: Array | None = np.frombuffer(whole, dtype=storage).reshape(shape)
        self._view = _core.View(
            self.address,
            self.address + tile,
            2 * tile,
            head,
            slot,
            layer,
            self.capacity_tokens,
            DTYPES[dtype],
            head_dim,
            num_kv_heads,
            num_slots,
            num_layers,
        )

    @property
    def pages(self) -> Array:
        """The pool as ``[layer, slot, kv_head, page, K or V, 64, head_dim]``; a view, valid until :meth:`close`."""
        if self._pages is None:
            message = "the KV pool is closed; allocate a new PagedKV"
            raise RunError(message)
        return self._pages

    @property
    def view(self) -> _core.View:
        """Addresses and strides for the extension."""
        _ = self.pages
        return self._view

    def check_place(self, layer: int, slot: int, start: int, stop: int) -> None:
        """Refuse a layer, slot or range of positions that the pool does not have."""
        if not 0 <= layer < self.num_layers:
            message = f"layer must be in 0..{self.num_layers - 1}, got {layer}"
            raise ConfigError(message)
        if not 0 <= slot < self.num_slots:
            message = f"slot must be in 0..{self.num_slots - 1}, got {slot}"
            raise ConfigError(message)
        if not 0 <= start <= stop <= self.capacity_tokens:
            message = (
                f"positions {start}..{stop} do not fit in slot {slot} of {self.capacity_tokens} tokens; "
                "allocate the pool for the last block of the run"
            )
            raise CapacityError(message)

    def append(self, layer: int, slot: int, start: int, k: Any, v: Any) -> None:
        """Write positions ``[start, start + tokens)``.

        Parameters
        ----------
        k, v
            ``[tokens, kv_heads, head_dim]`` in the pool's dtype: torch tensors in host memory, or numpy (bf16 as
            ``uint16``).
        """
        arrays = [as_storage(k, self.dtype, "k"), as_storage(v, self.dtype, "v")]
        tokens = arrays[0].shape[0] if arrays[0].ndim else 0
        for name, array in zip(("k", "v"), arrays, strict=True):
            if array.shape != (tokens, self.num_kv_heads, self.head_dim):
                message = (
                    f"{name} must be [{tokens}, {self.num_kv_heads}, {self.head_dim}] "
                    f"(tokens, kv_heads, head_dim), got {list(array.shape)}"
                )
                raise ConfigError(message)
        self.check_place(layer, slot, start, start + tokens)
        pages = self.pages[layer, slot]
        for which, array in enumerate(arrays):
            at, position = 0, start
            while at < tokens:
                page, offset = divmod(position, PAGE_TOKENS)
                if offset == 0 and tokens - at >= PAGE_TOKENS:  # all whole pages in one strided copy
                    whole = (tokens - at) // PAGE_TOKENS
                    part = array[at : at + whole * PAGE_TOKENS]
                    part = part.reshape(whole, PAGE_TOKENS, self.num_kv_heads, self.head_dim)
                    pages[:, page : page + whole, which] = part.transpose(2, 0, 1, 3)
                    step = whole * PAGE_TOKENS
                else:
                    step = min(PAGE_TOKENS - offset, tokens - at)
                    pages[:, page, which, offset : offset + step] = array[at : at + step].swapaxes(0, 1)
                at, position = at + step, position + step

    def read(self, layer: int, slot: int, start: int, stop: int) -> tuple[Array, Array]:
        """Copies of K and V of positions ``[start, stop)``: ``[tokens, kv_heads, head_dim]`` in the storage dtype."""
        self.check_place(layer, slot, start, stop)
        first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
        found = []
        for which in (0, 1):
            part = self.pages[layer, slot, :, first:last, which].transpose(1, 2, 0, 3)
            rows = part.reshape(-1, self.num_kv_heads, self.head_dim)
            found.append(rows[start - first * PAGE_TOKENS : stop - first * PAGE_TOKENS].copy())
        return found[0], found[1]

    def first_touch(self, threads: int | None = None) -> None:
        """Have the workers touch every page in turn, before the pool is pinned or written by one thread.

        Memory lands on the node of the thread that touches it first: this spreads a pool over all nodes whose workers
        read it, while pinning it untouched would put it all on one. Contents stay.
        """
        _ = self.pages
        _core.touch(self.address, self.nbytes, threads or 0)

    def fill_normal(self, seed: int = 0, threads: int | None = None) -> None:
        """Fill the whole pool with unit normals, each page first touched by a worker: synthetic KV for measuring.

        Memory that an earlier pool has filled and left (:mod:`herald_exec.kernels.kept`) is not filled again.
        """
        _ = self.pages
        memory = self._memory
        there = memory.filled_bytes if memory.filled_dtype == self.dtype else 0
        if there < self.nbytes:
            elements = (self.nbytes - there) // STORAGE[self.dtype].itemsize
            _core.fill_normal(self.address + there, elements, DTYPES[self.dtype], seed, threads or 0)
            memory.filled_bytes, memory.filled_dtype = self.nbytes, self.dtype

    def close(self) -> None:
        """Free the memory. Views of :attr:`pages` and running kernels must be gone; a second call does nothing."""
        if self.address:
            self._pages = None
            self.address = 0
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FlatKV:
    """Plain arrays ``[slots, kv_heads, S, head_dim]`` (or ``[S, head_dim]``) read in place, as one layer.

    Parameters
    ----------
    k, v
        Contiguous torch tensors in host memory or numpy, of one dtype (bf16 as ``uint16`` in numpy).
    dtype
        KV dtype of both.
    """

    num_layers = 1

    def __init__(self, k: Any, v: Any, dtype: str = "bf16") -> None:
        if dtype not in DTYPES:
            raise unknown_name("KV dtype", dtype, DTYPES)
        self._k, self._v = as_storage(k, dtype, "k"), as_storage(v, dtype, "v")
        if self._k.shape != self._v.shape or self._k.ndim not in (2, 4):
            message = (
                "k and v must have one shape, [S, head_dim] or [slots, kv_heads, S, head_dim], "
                f"got {list(self._k.shape)} and {list(self._v.shape)}"
            )
            raise ConfigError(message)
        if not (self._k.flags.c_contiguous and self._v.flags.c_contiguous):
            message = "k and v must be contiguous; pass k.contiguous(), v.contiguous()"
            raise ConfigError(message)
        shape = (1,) * (4 - self._k.ndim) + self._k.shape
        self.num_slots, self.num_kv_heads, self.capacity_tokens, self.head_dim = shape
        self.dtype = dtype
        sizes = {"num_slots": shape[0], "num_kv_heads": shape[1], "capacity_tokens": shape[2], "head_dim": shape[3]}
        _check_shape(sizes, dtype)
        row = self.head_dim * STORAGE[dtype].itemsize
        head = self.capacity_tokens * row
        self.nbytes = self._k.nbytes + self._v.nbytes
        self.view = _core.View(
            self._k.ctypes.data,
            self._v.ctypes.data,
            PAGE_TOKENS * row,
            head,
            self.num_kv_heads * head,
            0,
            self.capacity_tokens,
            DTYPES[dtype],
            self.head_dim,
            self.num_kv_heads,
            self.num_slots,
            1,
        )

    def read(self, layer: int, slot: int, start: int, stop: int) -> tuple[Array, Array]:
        """Copies of K and V of positions ``[start, stop)``: ``[tokens, kv_heads, head_dim]``."""
        shape = (self.num_slots, self.num_kv_heads, self.capacity_tokens, self.head_dim)
        if layer != 0 or not 0 <= slot < self.num_slots or not 0 <= start <= stop <= self.capacity_tokens:
            message = f"layer {layer}, slot {slot}, positions {start}..{stop} are outside of {list(shape)}"
            raise ConfigError(message)
        k, v = (array.reshape(shape)[slot, :, start:stop].swapaxes(0, 1).copy() for array in (self._k, self._v))
        return k, v
