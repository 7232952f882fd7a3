"""Actions of ShadowKV: factor a prompt, pick chunks, rebuild keys while values come, attend, fold a completed block."""

from herald_exec.blocks import BlockForward, attend_prefix, store_block
from herald_exec.prefill import prefill
from herald_exec.session import Session, Task, action
from herald_exec.shadow import Shadow
from herald_pipeline.methods.shadowkv import outlier_chunks
from herald_pipeline.pools import Buffer, Region

_PROJECTED = "shadow projections"


def _shadow(session: Session) -> Shadow:
    assert session.pools.shadow is not None
    return session.pools.shadow


@action("shadow_prefill")
def shadow_prefill(session: Session, task: Task) -> None:
    """One layer of the prompts; its keys are factored before the layer's place in the ring is used again."""
    prefill(session, task)
    task.require(task.writes("shadow", Region.BLOCK), "factoring the prompt's keys")
    computed = session.pools.prompt[task.turn % session.pipeline.pool("prompt").buffers]
    for row, kv in zip(task.rows, computed, strict=True):
        _shadow(session).factor(task.layer, row.slot, kv.keys[0], outlier_chunks(row.to_select))


@action("offload_values")
def offload_values(session: Session, task: Task) -> None:
    """A layer of the prompts' values to host memory, out of the prompt's ring."""
    reads = task.reads("prompt", buffer=Buffer.RING)
    task.require(reads and task.writes("values", Region.BLOCK), "moving the prompt's values")
    place = task.turn % session.pipeline.pool("prompt").buffers
    for row, kv in zip(task.rows, session.pools.prompt.pop(place), strict=True):
        _shadow(session).store_values(task.layer, row.slot, 0, kv.values[0])
        task.num_bytes += kv.values.nbytes


@action("score_landmarks")
def score_landmarks(session: Session, task: Task) -> None:
    """Project the block's tokens and pick the positions that this layer attends to."""
    task.require(task.reads("shadow", Region.PREFIX) and task.writes("picked"), "scoring landmarks")
    if task.layer == 0:
        for row in task.rows:
            session.state.begin(row)
        session.passes[task.stage.stream] = BlockForward(session, task.rows)
    forward: BlockForward = session.passes[task.stage.stream]
    shadow = _shadow(session)
    q, own = forward.project(task.layer)
    session.passes[_PROJECTED] = (q, own)
    for i, row in enumerate(forward.rows):
        found = shadow.pick(task.layer, row.slot, q[i], row.prefix, row.to_select)
        shadow.picked[task.layer, row.slot] = (found, found.cpu())


@action("gather_values")
def gather_values(session: Session, task: Task) -> None:
    """Values of the picked positions, one after another, for the upload."""
    reads = task.reads("values", Region.PREFIX) and task.reads("picked")
    task.require(reads and task.writes("staged_values"), "gathering values")
    shadow = _shadow(session)
    for row in task.rows:
        shadow.stage_values(task.layer, row.slot, shadow.picked[task.layer, row.slot][1])
        task.num_bytes += row.to_select * (session.entry_bytes(host=True) + session.entry_bytes()) // 2


@action("upload_values")
def upload_values(session: Session, task: Task) -> None:
    """Gathered values into the selected entries of the sparse pool."""
    task.require(task.reads("staged_values") and task.writes("sparse", Region.VALUES), "writing the picked values")
    sparse = session.pools.stores["sparse"]
    for row in task.rows:
        values = _shadow(session).staged(row.slot, row.to_select)
        sparse.layer(task.layer).values[row.slot, :, : row.to_select] = values.to(session.device, non_blocking=True)
        task.num_bytes += values.nbytes


@action("rebuild_keys")
def rebuild_keys(session: Session, task: Task) -> None:
    """Keys of the picked positions into the selected entries of the sparse pool."""
    reads = task.reads("shadow", Region.PREFIX) and task.reads("picked")
    task.require(reads and task.writes("sparse", Region.SELECTED), "writing the rebuilt keys")
    shadow, sparse = _shadow(session), session.pools.stores["sparse"]
    for row in task.rows:
        positions, _ = shadow.picked[task.layer, row.slot]
        keys = shadow.keys_at(task.layer, row.slot, positions, row.prefix)
        sparse.write_keys(task.layer, row.slot, keys, positions)


@action("shadow_step")
def shadow_step(session: Session, task: Task) -> None:
    """Attention of step 0 to what has been rebuilt and fetched, and the rest of the layer."""
    task.require(task.reads("sparse", Region.VALUES), "reading the fetched values")
    forward: BlockForward = session.passes[task.stage.stream]
    q, own = session.passes.pop(_PROJECTED)
    store_block(session, task, task.layer, forward.rows, own, forward.positions)
    forward.attend(task.layer, q, own, attend_prefix(session, task, task.layer, forward.rows, q))
    task.num_bytes += (task.launch.shape.selected_tokens + task.launch.shape.tokens) * session.entry_bytes()


@action("fold_keys")
def fold_keys(session: Session, task: Task) -> None:
    """A completed block's clean keys into the shadow, all layers."""
    task.require(task.reads("clean") and task.writes("shadow", Region.BLOCK), "folding the block's keys")
    clean = session.pools.stores["clean"]
    for row in task.rows:
        for layer in range(session.num_layers):
            keys = clean.read(layer, row.slot, 0, session.block_length).keys[0]
            _shadow(session).fold(layer, row.slot, row.prefix, keys)


@action("append_values")
def append_values(session: Session, task: Task) -> None:
    """A completed block's clean values behind the prefix in host memory."""
    task.require(task.reads("clean") and task.writes("values", Region.BLOCK), "appending values")
    clean = session.pools.stores["clean"]
    for row in task.rows:
        for layer in range(session.num_layers):
            values = clean.read(layer, row.slot, 0, session.block_length).values[0]
            _shadow(session).store_values(layer, row.slot, row.prefix, values)
            task.num_bytes += values.nbytes
