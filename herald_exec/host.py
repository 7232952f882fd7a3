"""KV in host memory: the full cache and the draft, read by the CPU kernels and by nobody else."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from herald_exec import kernels
from herald_exec.kernels import PAGE_TOKENS, Draft, Int8Keys, PagedKV, Selection, SelectOptions
from herald_pipeline.errors import RunError
from herald_pipeline.model import ModelShape
from herald_pipeline.settings import INT8_CANDIDATES

COPIERS = 4
"""Threads that put blocks into pages beside a selection: most of the memory's rate, few enough to leave cores."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class HostKV:
    """Paged KV of all layers for ``slots`` requests of up to ``tokens`` positions.

    Keeps how many positions of each (layer, slot) have been written, so that a gap, a position written twice or a read
    beyond the end is an error and not a wrong answer. Layers in ``keys8`` keep their keys in 8 bits as well.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        tokens: int,
        shape: ModelShape,
        dtype: torch.dtype,
        keys8: Sequence[int] = (),
    ) -> None:
        self.dtype = dtype
        self.entry_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self.pages = PagedKV(layers, slots, shape.num_kv_heads, max(tokens, 1), shape.head_dim, _NAMES[dtype])
        self._lengths = np.zeros((layers, slots), np.int64)
        self._with_keys8 = frozenset(keys8)
        self._keys8 = Int8Keys(self.pages) if keys8 else None
        self._extra: PagedKV | None = None
        self._copiers: ThreadPoolExecutor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes mapped."""
        if not self.pages.address:
            return 0
        keys8 = 0 if self._keys8 is None else self._keys8.nbytes * len(self._with_keys8) // self.pages.num_layers
        return self.pages.nbytes + keys8

    def append(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[kv, n, d]`` behind the ``start`` positions that are there already; 0 begins the slot anew."""
        held = int(self._lengths[layer, slot])
        if start not in (0, held):
            raise RunError(f"layer {layer}, slot {slot}: {held} positions are stored, the next write begins at {start}")
        if keys.shape[1]:
            k, v = (part.transpose(0, 1).to("cpu", self.dtype) for part in (keys, values))
            self.pages.append(layer, slot, start, k, v)
            self._update_keys8(layer, [slot], [start], keys.shape[1])
        self._lengths[layer, slot] = start + keys.shape[1]

    def append_blocks(
        self, slots: Sequence[int], starts: Sequence[int], keys: Tensor, values: Tensor, threads: int = COPIERS
    ) -> None:
        """Write ``[layers, R, kv, n, d]``, a block of each row in all layers, behind ``starts``; 0 begins a slot anew.

        Rows in consecutive slots whose blocks lie alike in their pages are written in one copy. ``threads`` at most
        write; the first call decides.
        """
        held = self._lengths[:, slots]
        wrong = (np.array(starts) != 0) & (held != np.array(starts))
        if wrong.any():
            layer, i = (int(found[0]) for found in wrong.nonzero())
            raise RunError(
                f"layer {layer}, slot {slots[i]}: {held[layer, i]} positions are stored, "
                f"the next write begins at {starts[i]}"
            )
        count, alike = keys.shape[3], len(set(starts)) == 1 and _consecutive(slots)
        groups = [(slice(0, len(slots)), starts[0])] if alike else [(slice(i, i + 1), s) for i, s in enumerate(starts)]
        pages = self.pages.pages.view(f"i{self.dtype.itemsize}")
        for rows, start in groups:
            at = slice(slots[rows.start], slots[rows.start] + rows.stop - rows.start)
            bits = [self._bits(part[:, rows]) for part in (keys, values)]

            def copy_layer(layer: int, at: slice = at, start: int = start, bits: list[Any] = bits) -> None:
                _into_pages(pages[layer, at], start, bits, layer)
                self._update_keys8(layer, range(at.start, at.stop), [start] * (at.stop - at.start), count)

            self._copy(copy_layer, threads)
        self._lengths[:, slots] = np.array(starts) + count

    def _bits(self, values: Tensor) -> npt.NDArray[Any]:
        """Values in the pages' format, as integers of its width whatever their type."""
        bits: npt.NDArray[Any] = values.to(self.dtype).view(getattr(torch, f"int{8 * self.dtype.itemsize}")).numpy()
        return bits

    def _update_keys8(self, layer: int, slots: Sequence[int], starts: Sequence[int], count: int) -> None:
        """Keys of ``count`` new positions in 8 bits too, by this thread alone."""
        if self._keys8 is not None and layer in self._with_keys8:
            for slot, start in zip(slots, starts, strict=True):
                self._keys8.update(layer, slot, start, start + count, threads=1)

    def _copy(self, copy_layer: Callable[[int], None], threads: int) -> None:
        """Copy every layer, by a few threads that sleep before and after.

        torch's own would spin for milliseconds behind it and take cores from the selection that runs or begins.
        """
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(max(1, min(threads, len(self._lengths))), "herald-append")
        list(self._copiers.map(copy_layer, range(self._lengths.shape[0])))

    def read(self, layer: int, slot: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions ``[0, stop)``, ``[kv, stop, d]`` each."""
        self._check(layer, [slot], [stop])
        k, v = self.pages.read(layer, slot, 0, stop)
        return self._tensor(k), self._tensor(v)

    def stored_pages(self, layer: int, slot: int, stop: int) -> Tensor:
        """View of the pages that hold positions ``[0, stop)``: ``[kv, pages, 2, 64, d]``, keys first in each."""
        self._check(layer, [slot], [stop])
        pages = self.pages.pages[layer, slot, :, : -(-stop // PAGE_TOKENS)]
        tensor = torch.from_numpy(pages)
        return tensor.view(torch.bfloat16) if self.dtype is torch.bfloat16 else tensor

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.view(torch.bfloat16) if self.dtype is torch.bfloat16 else tensor).transpose(0, 1)

    def select(
        self,
        layer: int,
        slots: Sequence[int],
        lengths: Sequence[int],
        queries: Tensor,
        budgets: Sequence[int],
        own: tuple[Tensor, Tensor],
        *,
        draft: "HostKV | None" = None,
        draft_length: int = 0,
        threads: int | None = None,
        keys: str = "full",
        gathered: tuple[Tensor, Tensor] | None = None,
        output: npt.NDArray[np.float32] | None = None,
    ) -> Selection:
        """Attention of ``queries [R, x, heads, d]`` over the prefix, the draft and their ``own`` keys; and top-k.

        ``gathered [R, kv, max k, d]`` takes the selected entries as :meth:`gather` would leave them.
        See :func:`herald_exec.kernels.select`.
        """
        alike = gathered is not None and gathered[0].dtype is self.dtype
        self._check(layer, slots, lengths)
        extra = None
        if draft is not None:
            draft._check(layer, slots, [draft_length] * len(slots))
            extra = Draft(draft.pages, np.array(slots), np.full(len(slots), draft_length))
        alone: tuple[Tensor, Tensor] | None = own
        if queries.shape[1] > 1:
            # The kernel shows a query its own key only; a block's queries see one another, as rows behind the draft.
            extra, alone = self._with_block(layer, slots, own, draft, draft_length), None
        found = kernels.select(
            self.pages,
            layer,
            np.array(slots),
            np.array(lengths),
            queries,
            np.array(budgets),
            draft=extra,
            extra_kv=alone,
            keys8=self._keys8 if keys == "int8" else None,
            options=SelectOptions(key_only=keys == "key-only", candidates=INT8_CANDIDATES),
            threads=threads,
            gathered=gathered if alike else None,
            output=output,
        )
        if gathered is not None and not alike:
            self.gather(layer, slots, found, *gathered, threads)
        if found.status.any():
            row = int(found.status.any(axis=1).argmax())
            raise RunError(f"layer {layer}, slot {slots[row]}: keys, values or queries are not finite")
        return found

    def _with_block(
        self, layer: int, slots: Sequence[int], own: tuple[Tensor, Tensor], draft: "HostKV | None", draft_length: int
    ) -> Draft:
        """The draft's rows and then the block's own, in one buffer that the kernel reads as extra rows."""
        length = draft_length + own[0].shape[1] if draft is not None else own[0].shape[1]
        if self._extra is None or self._extra.capacity_tokens < length:
            pages = self.pages
            self._extra = PagedKV(1, pages.num_slots, pages.num_kv_heads, length, pages.head_dim, pages.dtype)
        if draft is not None:
            for i, slot in enumerate(slots):
                self._extra.append(0, i, 0, *draft.pages.read(layer, slot, 0, draft_length))
        rows = len(slots)
        # All rows go to their pages in one copy; row by row that took a millisecond at 16 blocks, on one core of all.
        # They are converted row by row, which torch does in this thread: its others would spin beside the kernels.
        bits = []
        for part in own:
            narrow = torch.empty(part.shape, dtype=self.dtype)
            for to, row in zip(narrow, part, strict=True):
                to.copy_(row)
            bits.append(self._bits(narrow.transpose(1, 2))[None])
        _into_pages(self._extra.pages[0, :rows].view(bits[0].dtype), length - own[0].shape[1], bits, 0)
        return Draft(self._extra, np.arange(rows), np.full(rows, length), layer=0)

    def gather(
        self, layer: int, slots: Sequence[int], found: Selection, keys: Tensor, values: Tensor, threads: int | None
    ) -> None:
        """Copy the selected entries into ``keys`` and ``values`` ``[R, kv, max k, d]``, ascending."""
        if keys.dtype is self.dtype:
            kernels.gather(self.pages, layer, np.array(slots), found, keys, values, threads=threads)
            return
        # Another format on the device: converted on the way.
        k, v = (torch.empty(keys.shape, dtype=self.dtype) for _ in range(2))
        kernels.gather(self.pages, layer, np.array(slots), found, k, v, threads=threads)
        keys.copy_(k)
        values.copy_(v)

    def fill(self, slot: int, tokens: int) -> None:
        """Count ``tokens`` positions of a slot as stored: the pool has been filled with synthetic KV."""
        self._lengths[:, slot] = tokens
        if self._keys8 is not None and tokens:
            for layer in self._with_keys8:
                self._keys8.update(layer, slot, 0, tokens)

    def length(self, layer: int, slot: int) -> int:
        """Positions stored."""
        return int(self._lengths[layer, slot])

    def _check(self, layer: int, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if length > self._lengths[layer, slot]:
                raise RunError(
                    f"layer {layer}, slot {slot}: {length} positions are read, {self._lengths[layer, slot]} are stored"
                )

    def checksum(self) -> float:
        """Sum over what is stored, weighted by place: equal contents give equal sums."""
        total = 0.0
        for layer in range(self._lengths.shape[0]):
            for slot in range(self._lengths.shape[1]):
                for part in self.read(layer, slot, self.length(layer, slot)):
                    flat = part.flatten().to(torch.float64)
                    total += float((flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)).sum())
        return total

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._copiers is not None:
            self._copiers.shutdown()
            self._copiers = None
        if self._keys8 is not None:
            self._keys8.close()
        self.pages.close()
        if self._extra is not None:
            self._extra.close()


def _into_pages(pages: npt.NDArray[Any], start: int, bits: Sequence[npt.NDArray[Any]], layer: int) -> None:
    """A layer of keys' and values' ``bits [layers, R, kv, n, d]`` into its ``pages [R, kv, page, 2, 64, d]``."""
    count, done = bits[0].shape[3], 0
    while done < count:
        page, offset = divmod(start + done, PAGE_TOKENS)
        step = min(PAGE_TOKENS - offset, count - done)
        for which, part in enumerate(bits):
            pages[:, :, page, which, offset : offset + step] = part[layer, :, :, done : done + step]
        done += step


def _consecutive(slots: Sequence[int]) -> bool:
    return all(later == earlier + 1 for earlier, later in pairwise(slots))
