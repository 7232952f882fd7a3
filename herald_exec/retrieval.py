"""Actions of a selection pass: project on the GPU, select on the CPU, finish on the GPU, layer by layer.

In HERALD the pass belongs to block n + 1 and runs beside block n's steps; its queries are [MASK] tokens. Where the pass
*is* step 0 (MAGE on the CPU), its queries are the block itself.
"""

from collections.abc import Sequence

import numpy as np
import torch

from herald_exec.attention import Partial, attend_partial, merge
from herald_exec.blocks import BlockForward, Lanes
from herald_exec.pools import KV
from herald_exec.requests import Row
from herald_exec.session import Session, Task, action, queries_per_row
from herald_pipeline.pools import Buffer, Region
from herald_pipeline.work import Forward


def mask_queries(session: Session, rows: tuple[Row, ...], queries: int) -> Lanes:
    """``queries`` [MASK] tokens of the block (or window) that the pass selects for, around its centre.

    One query is the representative, index B // 2 (paper section IV-A2); B queries are the whole block.
    """
    block, lookahead = session.block_length, session.pipeline.template.lookahead
    first = session.window // 2 - queries // 2
    starts = torch.tensor([row.prefix + lookahead * block + first for row in rows], device=session.device)
    positions = starts[:, None] + torch.arange(queries, device=session.device)
    return Lanes(session, rows, torch.full_like(positions, session.model.shape.mask_token_id), positions)


def _pass(session: Session, task: Task) -> Lanes:
    """The pass that this launch is part of; layer 0 begins a new one."""
    if task.layer == 0:
        decides = any(stage.action == "decide" for stage in session.pipeline.template.stages())
        lanes: Lanes
        if decides:
            for row in task.rows:
                session.state.begin(row)
            lanes = BlockForward(session, task.rows)
        else:
            lanes = mask_queries(session, task.rows, queries_per_row(task))
        session.passes[task.stage.stream] = lanes
    found: Lanes = session.passes[task.stage.stream]
    return found


@action("project")
def project(session: Session, task: Task) -> None:
    """Queries and their own KV of one layer, to the host in fp32."""
    lanes, exchange = _pass(session, task), session.pools.exchange
    assert exchange is not None
    task.require(task.writes("query"), "writing the queries")
    q, own = lanes.project(task.layer)
    lanes.keep_completed(task, task.layer, own)
    rows, queries = q.shape[:2]
    exchange.q[:rows, :queries].copy_(q)
    exchange.k[:rows, :queries].copy_(own.keys.transpose(1, 2))
    exchange.v[:rows, :queries].copy_(own.values.transpose(1, 2))


@action("select")
def select(session: Session, task: Task) -> None:
    """Attention and top-k on the CPU over the full prefix, the draft and the queries' own keys."""
    lanes, pools = _pass_of(session, task), session.pools
    exchange, layer = pools.exchange, task.layer
    assert exchange is not None
    task.require(task.reads("full", Region.PREFIX) and task.reads("query"), "scoring the full prefix")
    rows, queries = lanes.positions.shape
    drafts = task.reads("draft")
    # Exact layers attend, but select nothing.
    keeps = "sparse" in pools.stores and pools.stores["sparse"].holds(layer)
    slots = [row.slot for row in lanes.rows]
    lengths = [row.prefix for row in lanes.rows]
    into = _ring_place(session, task, [row.to_select for row in lanes.rows]) if keeps else None
    # Where the device reads it: an array of its own would be new pages, and a copy while all cores wait.
    output = exchange.output[:rows, :queries].numpy()
    direct = output.flags.c_contiguous
    found = pools.hosts["full"].select(
        layer,
        slots,
        lengths,
        exchange.q[:rows, :queries].contiguous(),
        [row.to_select if keeps else 0 for row in lanes.rows],
        (exchange.k[:rows, :queries].contiguous(), exchange.v[:rows, :queries].contiguous()),
        draft=pools.hosts["draft"] if drafts else None,
        draft_length=session.pipeline.settings.drafted_tokens,
        threads=session.threads,
        keys=session.pipeline.settings.keys if keeps else "full",
        gathered=into,
        output=output if direct else None,
    )
    if not direct:
        # Not by torch: its threads would spin for a while behind a copy of this size, beside the next kernels.
        np.copyto(output, found.output)
    if keeps:
        pools.indices[layer, lanes.rows[0].slot] = found
    selected = sum(row.to_select for row in lanes.rows) if keeps else 0
    extra = rows * session.pipeline.settings.drafted_tokens if drafts else 0
    task.num_bytes += _scanned_bytes(session, sum(lengths), selected, extra, keeps)
    if into is not None:
        task.num_bytes += selected * (session.entry_bytes(host=True) + session.entry_bytes())


def _ring_place(session: Session, task: Task, counts: Sequence[int]) -> KV | None:
    """Where a selection leaves the entries that it gathers itself (``gather=fused``)."""
    if session.pipeline.settings.gather != "fused":
        return None
    task.require(task.writes("gathered", buffer=Buffer.RING), "gathering the selected entries")
    ring = session.pools.stores["gathered"]
    return ring.flat(task.turn % ring.buffers, len(counts), max(counts))


def _scanned_bytes(session: Session, prefix: int, selected: int, extra: int, keeps: bool) -> float:
    """Bytes of host memory that a selection reads, as it reads them; ``extra`` entries are a draft's."""
    keys, entry = session.pipeline.settings.keys if keeps else "full", session.entry_bytes(host=True)
    if keys == "full":
        return (prefix + extra) * entry
    if keys == "key-only":
        return ((prefix + selected) / 2 + extra) * entry
    scan = prefix * Forward(session.model.shape, session.pipeline.settings).key8_bytes
    return scan + ((Forward.scored_again(selected, prefix) + selected) / 2 + extra) * entry


def _pass_of(session: Session, task: Task) -> Lanes:
    found: Lanes = session.passes[task.stage.stream]
    return found


@action("finish")
def finish(session: Session, task: Task) -> None:
    """Attention output back to the device, then output projection and feed-forward."""
    lanes, exchange = _pass_of(session, task), session.pools.exchange
    assert exchange is not None
    task.require(task.reads("output"), "reading the attention output")
    rows, queries = lanes.positions.shape
    attended = exchange.output[:rows, :queries].to(session.device, session.model.dtype)
    lanes.finish(task.layer, attended)
    if session.pools.hidden is not None and task.layer == session.num_layers - 1:
        _leave_hidden(session, task, lanes)


def _leave_hidden(session: Session, task: Task, lanes: Lanes) -> None:
    """A step 0 ends: the next pass of its stream may begin before the LM head has seen what this one has left."""
    task.require(task.writes("hidden"), "leaving the last hidden states")
    assert isinstance(lanes, BlockForward)
    assert session.pools.hidden is not None
    session.pools.hidden[[row.slot for row in lanes.rows]] = lanes.row_hidden


@action("exact_layer")
def exact_layer(session: Session, task: Task) -> None:
    """One exact layer of the pass on the GPU, over the prefix kept there (``exact_layers_on=gpu``)."""
    lanes, store = _pass(session, task), session.pools.stores["exact"]
    task.require(task.reads("exact", Region.PREFIX), "reading the exact pool")
    q, own = lanes.project(task.layer)
    parts: list[Partial] = []
    for i, row in enumerate(lanes.rows):
        kv = store.view(task.layer, [row.slot], row.prefix)
        parts.append(attend_partial(q[i : i + 1], kv.keys, kv.values))
        task.num_bytes += (row.prefix + lanes.positions.shape[1]) * session.entry_bytes()
    prefix = Partial(torch.cat([part.output for part in parts]), torch.cat([part.log_sum_exp for part in parts]))
    lanes.finish(task.layer, merge(prefix, attend_partial(q, own.keys, own.values)))


@action("gather")
def gather(session: Session, task: Task) -> None:
    """A layer's selected entries, ascending, into the next place of the pinned ring."""
    pools, rows = session.pools, task.rows
    ring = pools.stores["gathered"]
    indices = task.reads("indices") or task.reads("indices", buffer=Buffer.RING)
    task.require(indices and task.reads("full", Region.PREFIX), "reading the selected entries")
    found = pools.indices[task.layer, rows[0].slot]
    place = ring.flat(task.turn % ring.buffers, len(rows), found.indices.shape[2])
    slots = [row.slot for row in rows]
    pools.hosts["full"].gather(task.layer, slots, found, place.keys, place.values, session.threads)
    entries = sum(row.to_select for row in rows)
    task.num_bytes += entries * (session.entry_bytes(host=True) + session.entry_bytes())


@action("upload")
def upload(session: Session, task: Task) -> None:
    """A place of the ring into the selected region of the sparse pool, or into the ring on the device."""
    pools, rows = session.pools, task.rows
    ring = pools.stores["gathered"]
    found = pools.indices[task.layer, rows[0].slot]
    place = ring.flat(task.turn % ring.buffers, len(rows), found.indices.shape[2])
    positions = torch.from_numpy(found.indices)
    for group in _alike(rows):
        count = rows[group.start].to_select
        kv = KV(place.keys[group, :, :count], place.values[group, :, :count])
        land_selected(session, task, rows[group], kv, positions[group, :, :count])
    task.num_bytes += sum(row.to_select for row in rows) * session.entry_bytes()


def _alike(rows: tuple[Row, ...]) -> list[slice]:
    """Rows as runs that one copy moves: all of them where they select equally many, else each for itself."""
    if len({row.to_select for row in rows}) == 1:
        return [slice(0, len(rows))]
    return [slice(i, i + 1) for i in range(len(rows))]


def land_selected(session: Session, task: Task, rows: Sequence[Row], kv: KV, positions: torch.Tensor) -> None:
    """Uploaded entries ``[R, kv, k, d]`` of a layer where the stage declares them."""
    if not task.writes("fetched", buffer=Buffer.RING):
        write_selected(session, task, rows, kv, positions)
        return
    fetched = session.pools.stores["fetched"]
    at = [fetched.row(row.slot, task.turn % fetched.buffers) for row in rows]
    fetched.write(task.layer, at, [0] * len(rows), kv, positions)


def write_selected(session: Session, task: Task, rows: Sequence[Row], kv: KV, positions: torch.Tensor) -> None:
    """Selected entries ``[R, kv, k, d]`` of a layer, equally many a row, into the buffer that the stage declares."""
    sparse = session.pools.stores["sparse"]
    idle = session.double_buffered
    declared = task.writes("sparse", Region.SELECTED, Buffer.IDLE if idle else Buffer.ONE)
    task.require(declared, "writing the selected entries")
    at = [sparse.row(row.slot, row.idle if idle else 0) for row in rows]
    sparse.write(task.layer, at, [0] * len(rows), kv, positions)
