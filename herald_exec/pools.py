"""KV storage as the pipeline declares it: sizes come from the declaration, positions can be checked, all is freed.

Layouts (half-open ranges of entries, per row and KV head):

    full, exact      [0, S) completed | [S, S + B) the block
    sparse           [0, k) selected, ascending | [k, k + t) tail | [k + t, k + t + B) the block's own KV
    clean, draft_out [0, B) one block
    rings            one layer a place, launch i uses place i mod n

A double-buffered pool keeps buffer b of slot s in storage row ``b * slots + s``.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from herald_exec.host import HostKV
from herald_exec.kernels import Selection
from herald_pipeline.errors import RunError
from herald_pipeline.model import KVDtype, ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home, Pool, RequestSize

if TYPE_CHECKING:
    from herald_exec.proxies import PartialKeys
    from herald_exec.shadow import Shadow

TORCH_DTYPES = {KVDtype.FP32: torch.float32, KVDtype.BF16: torch.bfloat16, KVDtype.FP16: torch.float16}

OWN_STORAGE = ("indices", "prompt", "partial", "picked", "shadow", "values", "staged_values", "keys8", "hidden")
"""Pools that are no plain keys and values: what fills them also makes them."""

NOWHERE = -1
"""Position of an entry that holds nothing."""


class KV(NamedTuple):
    """Keys and values ``[R, kv, n, d]``."""

    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes


class KVStore:
    """Keys and values of one pool in device memory (or pinned host memory, for a ring).

    Parameters
    ----------
    pool
        The declaration; ``capacity`` entries a row and layer follow from its bytes.
    check
        Keep the absolute position of every entry beside it.
    """

    def __init__(
        self,
        pool: Pool,
        slots: int,
        size: RequestSize,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        check: bool,
        pinned: bool = False,
    ) -> None:
        self.name = pool.name
        self.home = pool.home
        self.slots = slots
        self.buffers = pool.buffers
        layers = (0,) if pool.shared else pool.layers
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._shared = pool.shared
        self.dtype = dtype
        entry = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self.capacity = round(pool.bytes_per_request(size)) // max(len(layers) * entry, 1)
        rows = pool.buffers * slots
        dims = (len(layers), rows, shape.num_kv_heads, self.capacity, shape.head_dim)
        self._keys = torch.zeros(dims, dtype=dtype, device=device, pin_memory=pinned)
        self._values = torch.zeros(dims, dtype=dtype, device=device, pin_memory=pinned)
        self._positions = torch.full(dims[:-1], NOWHERE, dtype=torch.int32) if check else None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._keys.nbytes + self._values.nbytes

    def layer(self, layer: int) -> KV:
        """All storage rows of a layer, ``[rows, kv, capacity, d]``; a ring's layers are its one place list."""
        at = self._layer(layer)
        return KV(self._keys[at], self._values[at])

    @property
    def contents(self) -> KV:
        """Everything, ``[layers, rows, kv, capacity, d]``."""
        return KV(self._keys, self._values)

    def _layer(self, layer: int) -> int:
        return 0 if self._shared else self._index[layer]

    def holds(self, layer: int) -> bool:
        """Whether the pool has this layer."""
        return self._shared or layer in self._index

    def row(self, slot: int, buffer: int = 0) -> int:
        """Storage row of a slot's buffer."""
        return buffer * self.slots + slot

    def write(self, layer: int, rows: Sequence[int], starts: Sequence[int], kv: KV, positions: Tensor) -> None:
        """Write ``kv [R, kv, n, d]`` at ``starts`` of storage ``rows``.

        ``positions`` is ``[R, n]``, or ``[R, kv, n]`` where KV heads hold different ones.
        """
        at = self._layer(layer)
        count = kv.keys.shape[2]
        if count == 0:
            return
        whole = _consecutive(rows) and len(set(starts)) == 1
        if whole:
            span = slice(starts[0], starts[0] + count)
            self._keys[at, rows[0] : rows[0] + len(rows), :, span] = kv.keys
            self._values[at, rows[0] : rows[0] + len(rows), :, span] = kv.values
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            span = slice(start, start + count)
            if not whole:
                self._keys[at, row, :, span] = kv.keys[i]
                self._values[at, row, :, span] = kv.values[i]
            if self._positions is not None:
                self._positions[at, row, :, span] = positions[i].to("cpu", torch.int32)

    def write_keys(self, layer: int, row: int, keys: Tensor, positions: Tensor) -> None:
        """Write ``keys [kv, n, d]`` of ``positions [kv, n]`` at the start of a row; their values come apart."""
        at, count = self._layer(layer), keys.shape[1]
        self._keys[at, row, :, :count] = keys
        if self._positions is not None:
            self._positions[at, row, :, :count] = positions.to("cpu", torch.int32)

    def view(self, layer: int, rows: Sequence[int], length: int) -> KV:
        """The first ``length`` entries of storage ``rows``: a view when the rows lie together, else a copy."""
        at = self._layer(layer)
        if _consecutive(rows):
            span = slice(rows[0], rows[0] + len(rows))
            return KV(self._keys[at, span, :, :length], self._values[at, span, :, :length])
        index = torch.tensor(list(rows), device=self._keys.device)
        return KV(self._keys[at, :, :, :length][index], self._values[at, :, :, :length][index])

    def read(self, layer: int, row: int, start: int, count: int) -> KV:
        """``count`` entries from ``start`` of one storage row, ``[1, kv, count, d]``."""
        at = self._layer(layer)
        span = slice(start, start + count)
        return KV(self._keys[at, row : row + 1, :, span], self._values[at, row : row + 1, :, span])

    def flat(self, place: int, rows: int, count: int) -> KV:
        """Place of a ring as ``[rows, kv, count, d]``, contiguous: what a gather fills and an upload reads."""
        _, _, heads, _, dim = self._keys.shape
        span = slice(place * self.slots, (place + 1) * self.slots)
        size = rows * heads * count * dim
        dims = (rows, heads, count, dim)
        return KV(self._keys[0, span].view(-1)[:size].view(dims), self._values[0, span].view(-1)[:size].view(dims))

    def clear(self, slot: int) -> None:
        """Forget the positions of a slot: another request moves in."""
        if self._positions is not None and not self._shared:
            for buffer in range(self.buffers):
                self._positions[:, self.row(slot, buffer)] = NOWHERE

    def check_range(self, layer: int, row: int, expected: Tensor, selected: int, where: str) -> None:
        """Check the positions of a row that a step is about to read.

        ``expected`` are the positions that must stand behind the ``selected`` ones; those must be ascending, distinct,
        and not among the expected.
        """
        if self._positions is None:
            return
        held = self._positions[self._layer(layer), row, :, : selected + len(expected)]
        chosen, rest = held[:, :selected], held[:, selected:]
        at = f"{where}: pool {self.name!r}, layer {layer}"
        if not bool((rest == expected.to(torch.int32)).all()):
            raise RunError(f"{at}: expected {expected.tolist()} behind the selected, found {rest[0].tolist()}")
        rising = bool((chosen[:, 1:] > chosen[:, :-1]).all()) and bool((chosen >= 0).all())
        below = not len(expected) or not selected or bool((chosen[:, -1] < int(expected[0])).all())
        if not (rising and below):
            raise RunError(f"{at}: a position stands twice or out of order: {chosen.tolist()}")

    def checksum(self) -> float:
        """Sum over all entries, weighted by place: equal contents give equal sums."""
        flat = torch.cat([self._keys.flatten(), self._values.flatten()]).to("cpu", torch.float64)
        return float((flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)).sum())


class Exchange:
    """Pinned buffers between the GPU and the CPU's selection, for all rows of one launch (fp32)."""

    def __init__(self, slots: int, queries: int, shape: ModelShape, pinned: bool = False) -> None:
        heads, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q = torch.zeros(slots, queries, heads, dim, pin_memory=pinned)
        self.k = torch.zeros(slots, queries, kv, dim, pin_memory=pinned)
        self.v = torch.zeros(slots, queries, kv, dim, pin_memory=pinned)
        self.output = torch.zeros(slots, queries, heads, dim, pin_memory=pinned)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.q.nbytes + self.k.nbytes + self.v.nbytes + self.output.nbytes


class Pools:
    """All pools of a pipeline for ``slots`` requests, and the bytes that they hold.

    ``size`` is the largest request's. Everything is freed by :meth:`close`; :attr:`num_bytes` is 0 then.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        slots: int,
        size: RequestSize,
        device: torch.device,
        *,
        queries: int,
        check: bool = False,
    ) -> None:
        shape, settings = pipeline.model, pipeline.settings
        device_dtype, host_dtype = TORCH_DTYPES[settings.kv_dtype], TORCH_DTYPES[settings.dram_kv_dtype]
        # Beside a GPU, buffers between it and the host are page-locked: its copies run by themselves only then.
        pinned = device.type == "cuda"
        self.slots = slots
        self.check = check
        self.stores: dict[str, KVStore] = {}
        self.hosts: dict[str, HostKV] = {}
        self.exchange: Exchange | None = None
        self.indices: dict[tuple[int, int], Selection] = {}
        """Per layer and first slot of a pass, the newest selection: ``[R, kv, max k]`` int32 and counts ``[R, kv]``."""
        self.hidden: Tensor | None = None
        """``[slots, B, H]``: what a step 0 on a stream of its own leaves for the LM head."""
        self.prompt: dict[int, list[KV]] = {}
        """Places of the prompt's ring: a layer's KV of each request being prefilled."""
        self.partial: PartialKeys | None = None
        """Partial keys that a proxy scores; they need the model, so the session makes them."""
        self.shadow: Shadow | None = None
        """ShadowKV's keys on the device and values in host memory; made by the session too."""
        try:
            for pool in pipeline.pools:
                if pool.name in ("full", "draft") and pool.home is Home.DRAM:
                    tokens = size.tokens if pool.name == "full" else settings.window_length
                    keys8 = next((p.layers for p in pipeline.pools if p.name == "keys8" and pool.name == "full"), ())
                    self.hosts[pool.name] = HostKV(len(pool.layers), slots, tokens, shape, host_dtype, keys8)
                elif pool.name in ("query", "output"):
                    self.exchange = self.exchange or Exchange(slots, queries, shape, pinned)
                elif pool.name == "hidden":
                    dims = (slots, settings.block_length, shape.hidden_size)
                    self.hidden = torch.zeros(dims, dtype=device_dtype, device=device)
                elif pool.name not in OWN_STORAGE:
                    home = device if pool.home is Home.HBM else torch.device("cpu")
                    pin = pinned and pool.home is Home.DRAM
                    self.stores[pool.name] = KVStore(pool, slots, size, shape, device_dtype, home, check, pin)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes held by all pools."""
        return self.bytes_in(Home.HBM) + self.bytes_in(Home.DRAM)

    def bytes_in(self, home: Home) -> int:
        """Bytes held in device memory, or in host memory."""
        held = sum(store.num_bytes for store in self.stores.values() if store.home is home)
        if home is Home.DRAM:
            held += sum(host.num_bytes for host in self.hosts.values())
            held += self.shadow.host_bytes if self.shadow else 0
            return held + (self.exchange.num_bytes if self.exchange else 0)
        held += self.hidden.nbytes if self.hidden is not None else 0
        held += self.partial.num_bytes if self.partial else 0
        held += self.shadow.num_bytes - self.shadow.host_bytes if self.shadow else 0
        return held + sum(kv.num_bytes for place in list(self.prompt.values()) for kv in place)

    def clear(self, slot: int) -> None:
        """Another request moves into ``slot``."""
        for store in self.stores.values():
            store.clear(slot)

    def checksums(self) -> dict[str, float]:
        """Checksum of every pool that outlives a block."""
        sums = {name: store.checksum() for name, store in self.stores.items() if name in ("full", "exact", "sparse")}
        return {**sums, **{f"host {name}": host.checksum() for name, host in self.hosts.items() if name == "full"}}

    def close(self) -> None:
        """Free everything; safe at any time and more than once."""
        for host in self.hosts.values():
            host.close()
        self.stores.clear()
        self.hosts.clear()
        self.indices.clear()
        self.prompt.clear()
        if self.partial is not None:
            self.partial.close()
        if self.shadow is not None:
            self.shadow.close()
        self.partial = self.shadow = None
        self.exchange = self.hidden = None


def _consecutive(rows: Sequence[int]) -> bool:
    return all(later == earlier + 1 for earlier, later in pairwise(rows))
