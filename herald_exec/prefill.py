"""The prefill action: a prompt and a [MASK] block through one layer, its KV to where the method keeps it.

Selection for block 0 uses the B [MASK] queries, on the GPU, before the layer's KV leaves (paper section IV-B2).
"""

import zlib

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.models.forward import attend_in_chunks
from herald_exec.models.layers import Rotary
from herald_exec.pools import KV
from herald_exec.requests import Row
from herald_exec.retrieval import write_selected
from herald_exec.session import Session, Task, action
from herald_pipeline.pools import Buffer, Region


class Prompt:
    """One request's prompt blocks and its [MASK] block, on their way through the layers."""

    def __init__(self, session: Session, row: Row) -> None:
        self.row = row
        self.context = row.prefix
        masks = torch.full((session.window,), session.model.shape.mask_token_id, device=session.device)
        tokens = torch.cat([session.state.tokens[row.slot, : self.context], masks])
        self.rotary: Rotary = session.model.rotary(torch.arange(len(tokens), device=session.device))
        self.hidden = session.model.embed(tokens)


@action("prefill")
def prefill(session: Session, task: Task) -> None:
    """One layer of the prompts of all rows."""
    if task.layer == 0:
        for row in task.rows:
            session.state.admit(row)
            session.pools.clear(row.slot)
            session.stopped.discard(row.slot)
        if not session.synthetic:
            session.passes["prefill"] = [Prompt(session, row) for row in task.rows]
    leaving = []
    for i, row in enumerate(task.rows):
        if session.synthetic:
            kv, positions = _synthetic(session, task, row)
        else:
            kv, positions = _layer(session, task, session.passes["prefill"][i])
        _keep(session, task, row, kv, positions)
        leaving.append(kv)
    if task.layer == session.num_layers - 1:
        # The prompts' hidden states would otherwise take device memory until the next ones come.
        session.passes.pop("prefill", None)
    if task.writes("prompt", buffer=Buffer.RING):
        session.pools.prompt[task.turn % session.pipeline.pool("prompt").buffers] = leaving


def _layer(session: Session, task: Task, prompt: Prompt) -> tuple[KV, Tensor | None]:
    """Forward of a layer: the prompt's KV ``[1, kv, S, d]``, and the positions selected for block 0."""
    model, context = session.model, prompt.context
    q, k, v = model.project(task.layer, prompt.hidden, prompt.rotary)
    q, k, v = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    prompt.hidden = model.finish(task.layer, prompt.hidden, _attended(session, prompt, q, k, v)[0])
    kv = KV(k[:, :, :context].contiguous(), v[:, :, :context].contiguous())
    if session.pools.partial is not None:
        session.pools.partial.begin(task.layer, prompt.row.slot, q[0, :context])
    selected = None
    if _selects(session, task):
        masks = KV(k[:, :, context:], v[:, :, context:])
        selected = top_positions(importance(q[:, context:], kv, masks), prompt.row.to_select)
    return kv, selected


def _attended(session: Session, prompt: Prompt, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Block-causal attention of a prompt and its masks; masks of a window see what the window's first step will."""
    slides = session.pipeline.settings.window_blocks > 1
    # Where blocks slide, those of the prompt are still the ones that the model was trained with.
    block = session.model.shape.block_length if slides else session.block_length
    chunk = block if q.is_cuda else block * max(1, 256 // block)
    if not slides:
        return attend_in_chunks(q, k, v, block, chunk)
    end, seen = prompt.context, session.sight(completing=False)
    if seen is not None:
        seen = torch.cat([seen.new_ones(session.window, end), seen], dim=1)
    masks = attend(q[:, end:], k, v, mask=seen)
    if end == 0:
        return masks
    return torch.cat([attend_in_chunks(q[:, :end], k[:, :, :end], v[:, :, :end], block, chunk), masks], dim=1)


def _synthetic(session: Session, task: Task, row: Row) -> tuple[KV, Tensor | None]:
    """Seeded random KV in the place of a computed prompt; block 0's selection is spread evenly over it."""
    shape = session.model.shape
    seed = zlib.crc32(f"{session.seed}:{row.request.id}:{task.layer}".encode())
    generator = torch.Generator(device=session.device).manual_seed(seed)
    dims = (1, shape.num_kv_heads, row.prefix, shape.head_dim)
    kv = KV(*(torch.randn(dims, generator=generator, device=session.device).to(session.model.dtype) for _ in "kv"))
    if session.pools.partial is not None:
        session.pools.partial.begin(task.layer, row.slot, kv.keys[0].transpose(0, 1))
    if not _selects(session, task):
        return kv, None
    even = torch.arange(row.to_select, device=session.device) * row.prefix // max(row.to_select, 1)
    return kv, even.expand(1, shape.num_kv_heads, -1)


def _selects(session: Session, task: Task) -> bool:
    sparse = session.pools.stores.get("sparse")
    return sparse is not None and sparse.holds(task.layer) and writes_selected(session, task)


def writes_selected(session: Session, task: Task) -> bool:
    """Whether a prefill leaves entries that are selected for block 0 in the sparse pool."""
    return task.writes("sparse", Region.SELECTED, Buffer.IDLE if session.double_buffered else Buffer.ONE)


def _keep(session: Session, task: Task, row: Row, kv: KV, selected: Tensor | None) -> None:
    """What stays on the device: all of it, an exact layer, or the selected entries."""
    for name in ("full", "exact"):
        store = session.pools.stores.get(name)
        if store is not None and store.holds(task.layer):
            task.require(task.writes(name, Region.BLOCK), f"keeping the prompt in {name}")
            store.write(task.layer, [row.slot], [0], kv, torch.arange(row.prefix)[None])
    if session.pools.partial is not None:
        task.require(task.writes("partial", Region.BLOCK), "writing partial keys")
        session.pools.partial.write(task.layer, row.slot, 0, kv.keys[0])
    if selected is not None:
        index = selected[..., None].expand(-1, -1, -1, kv.keys.shape[-1])
        picked = KV(kv.keys.gather(2, index), kv.values.gather(2, index))
        write_selected(session, task, [row], picked, selected)


def importance(q: Tensor, prefix: KV, own: KV) -> Tensor:
    """Attention weight that each prefix position gets, summed over the queries and heads of a KV head.

    ``q [R, x, heads, d]``; the softmax runs over the prefix and the queries' ``own`` keys. Result ``[R, kv, S]``, fp32.
    """
    rows, queries, heads, dim = q.shape
    kv_heads = prefix.keys.shape[1]
    if prefix.keys.shape[2] == 0:
        return q.new_zeros(rows, kv_heads, 0, dtype=torch.float32)
    folded = q.view(rows, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return folded_importance(folded, prefix, own)


def folded_importance(folded: Tensor, prefix: KV, own: KV) -> Tensor:
    """:func:`importance` of queries that are folded already, ``[R, kv, x * G, d]``; the prefix is not empty."""
    dim = folded.shape[-1]
    parts = [(folded.float() * dim**-0.5) @ part.keys.float().transpose(-2, -1) for part in (prefix, own)]
    total = torch.logsumexp(torch.cat([part.logsumexp(-1, keepdim=True) for part in parts], dim=-1), -1, keepdim=True)
    return torch.exp(parts[0] - total).sum(dim=2)


def top_positions(values: Tensor, count: int) -> Tensor:
    """Ascending positions of the ``count`` largest of ``values [.., S]``; of equal values the lower position stays."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
