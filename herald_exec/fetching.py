"""Actions of methods that bring a layer's full KV to the device and attend, or select, there."""

import torch

from herald_exec.attention import Partial, attend_partial
from herald_exec.blocks import BlockForward, store_block
from herald_exec.pools import KV
from herald_exec.prefill import importance, top_positions
from herald_exec.retrieval import write_selected
from herald_exec.session import Session, Task, action
from herald_pipeline.pools import Buffer, Region


@action("fetch")
def fetch(session: Session, task: Task) -> None:
    """A layer's full KV of every row from host memory into the next place of the ring."""
    task.require(task.reads("full", Region.PREFIX) and task.writes("fetched", buffer=Buffer.RING), "fetching a layer")
    ring, full = session.pools.stores["fetched"], session.pools.hosts["full"]
    place = task.turn % ring.buffers
    for row in task.rows:
        keys, values = full.read(task.layer, row.slot, row.prefix)
        kv = KV(keys[None].to(ring.dtype), values[None].to(ring.dtype))
        ring.write(task.layer, [ring.row(row.slot, place)], [0], kv, torch.arange(row.prefix)[None])
        task.num_bytes += kv.num_bytes


def _pass(session: Session, task: Task) -> BlockForward:
    """Step 0 of the rows' blocks; layer 0 begins it."""
    if task.layer == 0:
        for row in task.rows:
            session.state.begin(row)
        session.passes[task.stage.stream] = BlockForward(session, task.rows)
    found: BlockForward = session.passes[task.stage.stream]
    return found


@action("exact_step")
def exact_step(session: Session, task: Task) -> None:
    """A layer of step 0 over the prefix that is kept on the device."""
    forward = _pass(session, task)
    forward.run(task, task.layer)
    task.num_bytes += (task.launch.shape.prefix_tokens + task.launch.shape.tokens) * session.entry_bytes()


@action("select_step")
def select_step(session: Session, task: Task) -> None:
    """A layer of step 0 over the fetched KV; its most important entries become the sparse pool's."""
    forward, ring = _pass(session, task), session.pools.stores["fetched"]
    task.require(task.reads("fetched", buffer=Buffer.RING), "reading the fetched layer")
    place = task.turn % ring.buffers
    q, own = forward.project(task.layer)
    store_block(session, task, task.layer, forward.rows, own, forward.positions)
    parts: list[Partial] = []
    for i, row in enumerate(forward.rows):
        prefix = ring.view(task.layer, [ring.row(row.slot, place)], row.prefix)
        parts.append(attend_partial(q[i : i + 1], prefix.keys, prefix.values))
        lane = KV(own.keys[i : i + 1], own.values[i : i + 1])
        selected = top_positions(importance(q[i : i + 1], prefix, lane), row.to_select)
        index = selected[..., None].expand(-1, -1, -1, prefix.keys.shape[-1])
        write_selected(session, task, [row], KV(prefix.keys.gather(2, index), prefix.values.gather(2, index)), selected)
        task.num_bytes += (row.prefix + session.block_length) * session.entry_bytes()
    joined = Partial(torch.cat([part.output for part in parts]), torch.cat([part.log_sum_exp for part in parts]))
    forward.attend(task.layer, q, own, joined)
