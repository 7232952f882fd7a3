"""Actions as a GPU carries them out: graphs instead of launches, whole batches instead of rows.

Only what is worth it is here; select and gather are the same functions as on the CPU, and so are project and finish
of passes with more than one query and fewer than the block's.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from herald_exec.blocks import prefix_length, source
from herald_exec.cuda.acceptance import Acceptance
from herald_exec.cuda.block_pass import BlockPass, has_block_pass
from herald_exec.cuda.fetched import FetchedForward, fetches
from herald_exec.cuda.forward import LaneForward
from herald_exec.cuda.lanes import bucket
from herald_exec.cuda.proxy_pass import ProxyPass, has_proxy, keep_partial
from herald_exec.cuda.rows import RowFetch, reads_rows
from herald_exec.cuda.selection import SelectionPass, has_own_pass
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.host import COPIERS
from herald_exec.pools import KV, KVStore
from herald_exec.prefill import prefill as prefill_rows
from herald_exec.prefill import writes_selected
from herald_exec.requests import Row
from herald_exec.session import Action, Session, Task
from herald_exec.transfers import offload as offload_rows
from herald_pipeline.pools import Buffer, Region
from herald_pipeline.stages import Mode


class DeviceActions:
    """Actions of one session, with the buffers that they need; all are allocated before the first launch."""

    def __init__(self, session: Session, *, graphs: bool = True) -> None:
        self.session = session
        slots = session.pools.slots
        groups = 1 if session.pipeline.template.draft_step is None else 2
        self.forward = LaneForward(session, bucket(groups * session.rows_together), graphs=graphs)
        self.acceptance = Acceptance(session, self.forward.table)
        self.selection: SelectionPass | None = None
        if has_own_pass(session.pipeline):
            self.selection = SelectionPass(session, self.forward.feed_forward.beside(), graphs=graphs)
        self.block_pass: BlockPass | None = None
        if has_block_pass(session.pipeline):
            beside = self.forward.beside(session.rows_together)
            self.block_pass = BlockPass(session, beside, self.acceptance, graphs=graphs)
        self.fetched = FetchedForward(session, self.forward, self.acceptance) if fetches(session) else None
        steps = any(stage.action == "denoise" for stage in session.pipeline.template.stages())
        served = Counter(source(session, layer).name for layer in range(session.num_layers) if steps)
        self._layers = [(session.pools.stores[name], layers) for name, layers in served.items()]
        self.proxies = ProxyPass(session, self.forward, self.acceptance, graphs=graphs) if has_proxy(session) else None
        self.rows = RowFetch(session, self.proxies) if reads_rows(session) else None
        self._prepared = False
        self._filled = False
        stores = session.pools.stores
        ring = stores.get("gathered")
        self._landing: KV | None = None
        if ring is not None:
            place = ring.flat(0, slots, ring.capacity)
            self._landing = KV(*(torch.empty(part.numel(), dtype=part.dtype, device=session.device) for part in place))
        self._leaving: dict[str, KV] = {}

    def table(self) -> dict[str, Action]:
        """Action name -> function."""
        own: dict[str, Action] = {"denoise": self.denoise, "prefill": self.prefill, "offload": self.offload}
        if self.selection is not None:
            own.update(
                project=self.selection.project, finish=self.selection.finish, exact_layer=self.selection.exact_layer
            )
        for part in (self.block_pass, self.fetched, self.proxies):
            if part is not None:
                own.update(part.table())
        if self.rows is not None:
            own["fetch_rows"] = self.rows.fetch
        if "gathered" in self.session.pools.stores:
            own["upload"] = self.upload
        if "full" in self.session.pools.hosts:
            own["append"] = self.append
        if "draft" in self.session.pools.hosts:
            own["draft_down"] = self.draft_down
        return own

    # Main stream -----------------------------------------------------------------------------------------------------

    def denoise(self, session: Session, task: Task) -> Callable[[], Outcome] | Foreseen:
        """One forward of every running row; its outcome is foreseen, or read when the device has passed it."""
        rows = list(task.rows)
        for row in rows:
            session.state.begin(row)
        drafting = sum(row.mode is Mode.DRAFT for row in rows)
        lanes = bucket(len(rows) + drafting)
        self._require(task, rows)
        self.forward.table.fill(session, rows, lanes)
        total = self.acceptance.prepare(rows)
        self.forward.table.send()
        normed = self.forward(lanes)
        self._keep_partial(task, rows)
        task.num_bytes += self._kv_bytes(rows, drafting)
        return self.acceptance.issue(rows, normed, total)

    def _keep_partial(self, task: Task, rows: Sequence[Row]) -> None:
        """Partial keys of completed blocks, out of the clean KV that the forward has left."""
        done = [row for row in rows if row.mode.completes]
        if self.session.pools.partial is None or not done:
            return
        task.require(task.writes("partial", Region.BLOCK), "writing partial keys")
        for layer in range(self.session.num_layers):
            keep_partial(self.session, layer, done)

    def _require(self, task: Task, rows: Sequence[Row]) -> None:
        """Every access of the graph must be among those that the stage declares."""
        session, stores = self.session, self.session.pools.stores
        buffer = Buffer.ACTIVE if session.double_buffered else Buffer.ONE
        for name in ("full", "exact"):
            if name in stores:
                task.require(task.reads(name, Region.PREFIX), f"reading {name}")
                task.require(task.writes(name, Region.BLOCK), f"writing the block to {name}")
        if "sparse" in stores:
            task.require(task.reads("sparse", Region.SELECTED, buffer), "reading the selected entries")
        if any(row.mode.completes for row in rows) and "sparse" in stores:
            kept = task.writes("sparse", Region.TAIL, Buffer.IDLE) if session.double_buffered else task.writes("clean")
            task.require(kept, "writing clean KV")
        if any(row.mode.drafts for row in rows):
            task.require(task.writes("draft_out"), "writing the draft's KV")

    def _kv_bytes(self, rows: Sequence[Row], drafting: int) -> int:
        """KV bytes that attention reads (each row's prefix once) and writes (the lanes' own)."""
        own = (len(rows) + drafting) * self.session.block_length
        entries = 0
        for store, layers in self._layers:
            entries += layers * (sum(prefix_length(store, row) for row in rows) + own)
        return entries * self.session.entry_bytes()

    def prefill(self, session: Session, task: Task) -> None:
        """As on the CPU; synthetic KV is drawn in place, and all graphs of a full batch are captured first."""
        if not self._prepared:
            self._prepared = True
            for rows in session.full_batches:
                if self._layers:
                    self.forward.capture(bucket(rows))
                if session.pipeline.template.draft_step is not None:
                    self.forward.capture(bucket(2 * rows))
            if self.selection is not None:
                self.selection.prepare()
            for own in (self.block_pass, self.proxies):
                if own is not None:
                    own.prepare()
        if not session.synthetic:
            prefill_rows(session, task)
            return
        for row in task.rows:
            if task.layer == 0:
                session.state.admit(row)
                session.stopped.discard(row.slot)
            if session.pools.partial is not None:
                session.pools.partial.draw(task.layer, row.slot, row.prefix)
            for name in ("full", "exact", "sparse"):
                store = session.pools.stores.get(name)
                if store is None or not store.holds(task.layer):
                    continue
                sparse = name == "sparse"
                if sparse and not writes_selected(session, task):
                    continue
                at = store.row(row.slot, row.idle if sparse and store.buffers == 2 else 0)
                length = row.to_select if sparse else row.prefix
                for part in store.layer(task.layer):
                    part[at, :, :length].normal_()

    # Copy streams ----------------------------------------------------------------------------------------------------

    def offload(self, session: Session, task: Task) -> None:
        """A layer of the prompts' KV to the host; synthetic prompts are drawn there, once, by all threads."""
        if not session.synthetic:
            offload_rows(session, task)
            return
        task.require(task.writes("full", Region.BLOCK), "writing the prompt to the full pool")
        full = session.pools.hosts["full"]
        if not self._filled:
            self._filled = True
            full.pages.fill_normal(session.seed, session.threads)
        if task.layer == session.num_layers - 1:
            for row in task.rows:
                full.fill(row.slot, row.prefix)

    def upload(self, session: Session, task: Task) -> None:
        """A place of the ring to where the stage declares it: a copy over the link, one on the device."""
        stores, rows, idle = session.pools.stores, task.rows, session.double_buffered
        ring, to_ring = stores["gathered"], task.writes("fetched", buffer=Buffer.RING)
        declared = task.writes("sparse", Region.SELECTED, Buffer.IDLE if idle else Buffer.ONE)
        task.require(to_ring or declared, "writing the selected entries")
        assert self._landing is not None
        target_store = stores["fetched" if to_ring else "sparse"]
        found = session.pools.indices[task.layer, rows[0].slot]
        place = ring.flat(task.turn % ring.buffers, len(rows), found.indices.shape[2])
        if to_ring:
            at = [target_store.row(row.slot, task.turn % target_store.buffers) for row in rows]
        else:
            at = [target_store.row(row.slot, row.idle if idle else 0) for row in rows]
        for landing, source_part, target in zip(self._landing, place, target_store.layer(task.layer), strict=True):
            landed = landing[: source_part.numel()].view(source_part.shape)
            landed.copy_(source_part, non_blocking=True)
            put_rows(target, at, [0] * len(rows), landed, [row.to_select for row in rows])
        task.num_bytes += sum(row.to_select for row in rows) * session.entry_bytes()

    def draft_down(self, session: Session, task: Task) -> None:
        """The draft's KV of all rows and layers to the buffer that selection reads."""
        task.require(task.reads("draft_out") and task.writes("draft"), "moving the draft")
        slots = [row.slot for row in task.rows]
        zeros = [0] * len(slots)
        blocks = take_blocks(session.pools.stores["draft_out"], slots, zeros, session.block_length)
        # Selection waits for the draft, so its cores are free: all of them write.
        threads = session.threads or os.cpu_count() or COPIERS
        task.num_bytes += self._down("draft", [blocks], slots, zeros, threads)

    def append(self, session: Session, task: Task) -> None:
        """The completed blocks' clean KV of all layers behind the prefixes in host memory."""
        task.require(task.writes("full", Region.BLOCK), "appending to the full pool")
        rows, block, stores = task.rows, session.block_length, session.pools.stores
        slots, prefixes = [row.slot for row in rows], [row.prefix for row in rows]
        if not session.double_buffered:
            task.require(task.reads("clean"), "reading the clean KV")
            parts = [take_blocks(stores["clean"], slots, [0] * len(rows), block)]
        else:
            task.require(task.reads("sparse", Region.TAIL, Buffer.IDLE), "reading the idle pool's tail")
            task.require(task.reads("exact", Region.BLOCK), "reading the block's exact KV")
            sparse = stores["sparse"]
            at = [sparse.row(row.slot, row.idle) for row in rows]
            # The exact layers are the first ones, so the two parts lie in the order of the layers.
            parts = [take_blocks(stores["exact"], slots, prefixes, block)]
            parts.append(take_blocks(sparse, at, [row.to_select for row in rows], block))
        task.num_bytes += self._down("full", parts, slots, prefixes)

    def _down(
        self, pool: str, parts: Sequence[KV], slots: Sequence[int], starts: Sequence[int], threads: int = COPIERS
    ) -> int:
        """Blocks ``[layers, R, kv, B, d]`` of several stores, joined, through pinned memory into pages."""
        host = self._buffer(pool, [sum(part.keys.shape[0] for part in parts), *parts[0].keys.shape[1:]])
        first = 0
        for part in parts:
            span = slice(first, first + part.keys.shape[0])
            for to, device_part in zip(host, part, strict=True):
                to[span].copy_(device_part.contiguous(), non_blocking=True)
            first = span.stop
        if self.session.device.type == "cuda":
            # This copy stream alone: its thread puts the blocks into pages. An event, because a thread that waits for
            # a stream spins, and would take a core from the selection.
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            landed.record()
            landed.synchronize()
        self.session.pools.hosts[pool].append_blocks(slots, starts, *host, threads)
        return host.num_bytes

    def _buffer(self, pool: str, dims: Sequence[int]) -> KV:
        """Pinned memory of these dimensions, kept for the next launch of the same or a smaller size."""
        if pool not in self._leaving:
            whole = [dims[0], self.session.pools.slots, *dims[2:]]
            dtype, pin = self.session.model.kv_dtype, self.session.device.type == "cuda"
            self._leaving[pool] = KV(*(torch.empty(whole, dtype=dtype, pin_memory=pin).flatten() for _ in "kv"))
        size = 1
        for dim in dims:
            size *= dim
        return KV(*(part[:size].view(*dims) for part in self._leaving[pool]))

    def close(self) -> None:
        """Free graphs and buffers."""
        self.forward.close()
        if self.selection is not None:
            self.selection.close()
        for part in (self.block_pass, self.fetched, self.proxies, self.rows):
            if part is not None:
                part.close()
        self._leaving.clear()
        self._landing = None


def take_blocks(store: KVStore, rows: Sequence[int], starts: Sequence[int], count: int) -> KV:
    """``count`` entries of all layers from ``starts`` of storage ``rows``: ``[layers, R, kv, count, d]``.

    A view where rows lie together and starts are alike.
    """
    parts: list[Any] = []
    alike = len(set(starts)) == 1 and list(rows) == list(range(rows[0], rows[0] + len(rows)))
    for part in store.contents:
        if alike:
            parts.append(part[:, rows[0] : rows[0] + len(rows), :, starts[0] : starts[0] + count])
        else:
            cut = [part[:, row, :, start : start + count] for row, start in zip(rows, starts, strict=True)]
            parts.append(torch.stack(cut, dim=1))
    return KV(*parts)


def put_rows(target: Tensor, rows: Sequence[int], starts: Sequence[int], values: Tensor, counts: Sequence[int]) -> None:
    """The first ``counts`` entries of ``values [R, kv, n, d]`` to ``starts`` of ``rows`` of ``[.., kv, cap, d]``."""
    alike = len(set(starts)) == len(set(counts)) == 1 and list(rows) == list(range(rows[0], rows[0] + len(rows)))
    if alike:
        span = slice(starts[0], starts[0] + counts[0])
        target[rows[0] : rows[0] + len(rows), :, span] = values[:, :, : counts[0]]
        return
    for i, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        target[row, :, start : start + count] = values[i, :, :count]
