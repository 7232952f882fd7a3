"""Actions of the copy streams, and the swap."""

import torch

from herald_exec.pools import KV
from herald_exec.requests import Row
from herald_exec.session import Session, Task, action
from herald_pipeline.pools import Buffer, Region


@action("draft_down")
def draft_down(session: Session, task: Task) -> None:
    """The draft's KV to its buffer in host memory, which only selection reads."""
    task.require(task.reads("draft_out") and task.writes("draft"), "moving the draft")
    out, host = session.pools.stores["draft_out"], session.pools.hosts["draft"]
    for row in task.rows:
        for layer in range(session.num_layers):
            kv = out.read(layer, row.slot, 0, session.window)
            host.append(layer, row.slot, 0, kv.keys[0], kv.values[0])
            task.num_bytes += kv.num_bytes


@action("append")
def append(session: Session, task: Task) -> None:
    """A completed block's clean KV behind the prefix in host memory; the draft is thereby replaced."""
    task.require(task.writes("full", Region.BLOCK), "appending to the full pool")
    for row in task.rows:
        for layer in range(session.num_layers):
            kv = _clean(session, task, row, layer)
            session.pools.hosts["full"].append(layer, row.slot, row.prefix, kv.keys[0], kv.values[0])
            task.num_bytes += kv.num_bytes


def _clean(session: Session, task: Task, row: Row, layer: int) -> KV:
    """Where the completing forward left a block's KV."""
    pools, block = session.pools, session.block_length
    if not session.double_buffered:
        task.require(task.reads("clean"), "reading the clean KV")
        return pools.stores["clean"].read(layer, row.slot, 0, block)
    sparse = pools.stores["sparse"]
    if sparse.holds(layer):
        task.require(task.reads("sparse", Region.TAIL, Buffer.IDLE), "reading the idle pool's tail")
        return sparse.read(layer, sparse.row(row.slot, row.idle), row.to_select, block)
    task.require(task.reads("exact", Region.BLOCK), "reading the block's exact KV")
    return pools.stores["exact"].read(layer, row.slot, row.prefix, block)


@action("offload")
def offload(session: Session, task: Task) -> None:
    """A layer of the prompts' KV to the host, out of the prompt's ring."""
    task.require(task.writes("full", Region.BLOCK), "writing the prompt to the full pool")
    ring = session.pools.prompt
    place = task.turn % session.pipeline.pool("prompt").buffers
    for row, kv in zip(task.rows, ring.pop(place), strict=True):
        session.pools.hosts["full"].append(task.layer, row.slot, 0, kv.keys[0], kv.values[0])
        task.num_bytes += kv.num_bytes


@action("swap")
def swap(session: Session, task: Task) -> None:
    """The idle pool becomes the active one: nothing moves, the block index selects the buffer.

    By now both sides have ended, so the idle pool must hold the next block's selected entries and the tail.
    """
    if not session.pools.check or not session.double_buffered:
        return
    sparse = session.pools.stores["sparse"]
    for row in task.rows:
        tail = torch.arange(row.prefix, row.prefix + session.block_length)
        for layer in range(session.num_layers):
            if sparse.holds(layer):
                sparse.check_range(layer, sparse.row(row.slot, row.idle), tail, row.to_select, task.where)
