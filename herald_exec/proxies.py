"""InfiniGen's proxy: partial keys in a skewed basis, scored by speculated queries (``infinigen``, ``step-fetch``).

At a request's prefill the queries of its prompt are decomposed, and the basis V_q of a KV head's queries is kept in its
columns of largest query weight. Q' = Q A and K' = K A with one orthogonal A leave Q' K'^T = Q K^T, so a few columns
carry most of a score. A is applied after RoPE, because with RoPE it cannot be folded into the weights.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from herald_exec.blocks import BlockForward, attend_ragged
from herald_exec.kernels import Selection
from herald_exec.models.base import BlockModel
from herald_exec.models.layers import Rotary, rms_norm, rotate
from herald_exec.pools import KV
from herald_exec.prefill import top_positions
from herald_exec.retrieval import land_selected
from herald_exec.session import Session, Task, action
from herald_pipeline.pools import Buffer, Region


def skew(queries: Tensor, kv_heads: int, fraction: float) -> Tensor:
    """Kept columns of A of one layer: ``[.., kv, d, c]``, c the rounded share ``fraction`` of d, at least 1.

    Columns are those of V_q with the largest sum of |Q'| over a prompt, whose queries are ``[.., n, heads, d]``; those
    of a KV head's group are joined. Tokens that resemble no text do not do: on the reference model (1K, a budget of
    5%) a basis of random ones found .15 of what exact attention selects, one of the prompt .45. Without a whole block
    of prompt there is nothing to decompose: the first c axes.
    """
    *rows, tokens, heads, dim = queries.shape
    count = max(1, round(fraction * dim))
    if tokens == 0:
        return torch.eye(dim, count, dtype=queries.dtype, device=queries.device).expand(*rows, kv_heads, -1, -1)
    joined = queries.view(*rows, tokens, kv_heads, heads // kv_heads, dim).transpose(-3, -4).flatten(-3, -2).float()
    # On the host: a GPU decomposes a batch of small matrices one after the other, each slower than a core does.
    found = torch.linalg.eigh((joined.mT @ joined).cpu()).eigenvectors
    basis: Tensor = found.to(joined.device)
    kept = (joined @ basis).abs().sum(dim=-2).topk(count, dim=-1).indices
    return basis.gather(-1, kept.unsqueeze(-2).expand(*basis.shape[:-1], -1)).to(queries.dtype)


def proxy_importance(queries: Tensor, partial_keys: Tensor, columns: Tensor) -> Tensor:
    """Speculated attention weight of each prefix position ``[R, kv, S]``, fp32.

    ``queries [R, B, heads, d]``, ``partial_keys [R, kv, S, c]``, ``columns [R, kv, d, c]``. As for exact attention each
    query's weights add up to 1 over the prefix and are summed over the queries and heads of a KV head. With sums of
    plain scores one query's range outvotes the others: with all columns kept, 0 of 8 multi-needle answers of the
    reference model were right, with weights 8.
    """
    rows, block, heads, dim = queries.shape
    kv_heads = columns.shape[1]
    folded = queries.view(rows, block, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scores = (folded @ columns).float() @ partial_keys.float().mT
    return torch.softmax(scores * dim**-0.5, dim=-1).sum(dim=2)


class PartialKeys:
    """K' of every position on the device, ``[layers][slots, kv, tokens, c]``; in memory column by column.

    A few columns are no whole number of a GPU's words, positions are.
    """

    def __init__(self, model: BlockModel, fraction: float, slots: int, tokens: int) -> None:
        shape, self._fraction = model.shape, fraction
        count = max(1, round(fraction * shape.head_dim))

        def zeros(rows: int, columns: int) -> list[Tensor]:
            dims = (slots, shape.num_kv_heads, rows, columns)
            return [torch.zeros(dims, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)]

        self._keys, self.columns = [keys.mT for keys in zeros(count, tokens)], zeros(shape.head_dim, count)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(keys.nbytes for keys in self._keys)

    def keys(self, layer: int) -> Tensor:
        """K' of a layer, ``[slots, kv, tokens, c]``."""
        return self._keys[layer]

    def begin(self, layer: int, slot: int, queries: Tensor) -> None:
        """Fix the basis of a request by its prompt's ``queries [n, heads, d]``, before its keys are written."""
        columns = self.columns[layer]
        columns[slot] = skew(queries, columns.shape[1], self._fraction)

    def write(self, layer: int, slot: int, start: int, keys: Tensor) -> None:
        """Partial keys of ``keys [kv, n, d]`` at positions ``[start, start + n)``."""
        self._keys[layer][slot, :, start : start + keys.shape[1]] = keys @ self.columns[layer][slot]

    def write_blocks(self, layer: int, slots: Sequence[int], starts: Sequence[int], keys: Tensor) -> None:
        """:meth:`write` for blocks ``keys [R, kv, B, d]`` of several slots."""
        at, count = list(slots), keys.shape[2]
        moved = keys @ self.columns[layer][at]
        if len(set(starts)) == 1:
            self._keys[layer][at, :, starts[0] : starts[0] + count] = moved
            return
        for slot, start, block in zip(slots, starts, moved, strict=True):
            self._keys[layer][slot, :, start : start + count] = block

    def draw(self, layer: int, slot: int, tokens: int) -> None:
        """Random partial keys in the place of a prompt's, which without a prompt are those of the first axes."""
        columns = self.columns[layer]
        columns[slot] = skew(columns.new_zeros(0, columns.shape[1], columns.shape[2]), columns.shape[1], self._fraction)
        self._keys[layer][slot, :, :tokens].normal_()

    def pick(self, layer: int, slot: int, queries: Tensor, prefix: int, count: int) -> Tensor:
        """The ``count`` prefix positions of largest score ``[kv, count]``, ascending.

        ``queries [B, heads, d]``; see :func:`proxy_importance`.
        """
        row = slice(slot, slot + 1)
        scores = proxy_importance(queries[None], self._keys[layer][row, :, :prefix], self.columns[layer][row])
        return top_positions(scores[0], count)

    def close(self) -> None:
        """Free the memory."""
        self._keys.clear()
        self.columns.clear()


class SpeculatingForward(BlockForward):
    """A block's step that keeps what entered the layer before, from which the next layer's queries are speculated."""

    previous: Tensor | None = None

    def run(self, task: Task, layer: int) -> None:
        """See :class:`BlockForward`."""
        self.previous = self.hidden
        super().run(task, layer)


class Placed(Protocol):
    """Tokens with positions ``[R, n]`` and the angles of them all."""

    positions: Tensor
    rotary: Rotary


def speculated_queries(model: BlockModel, layer: int, lanes: Placed, hidden: Tensor) -> Tensor:
    """Queries of ``layer`` from the attention input of the layer before it: ``[rows, B, heads, d]``."""
    shape, weights = model.shape, model.weights.layers[layer]
    normed = rms_norm(hidden, model.weights.layers[max(layer - 1, 0)].input_norm, shape.norm_eps)
    size = shape.num_heads * shape.head_dim
    bias = None if weights.qkv_bias is None else weights.qkv_bias[:size]
    q = torch.nn.functional.linear(normed, weights.qkv[:size], bias).view(-1, shape.num_heads, shape.head_dim)
    if weights.q_norm is not None:
        q = rms_norm(q, weights.q_norm, shape.norm_eps)
    return rotate(q, lanes.rotary).view(*lanes.positions.shape, shape.num_heads, shape.head_dim)


def step_pass(session: Session, task: Task) -> SpeculatingForward:
    """The rows' step that runs layer by layer; layer 0 begins it."""
    if task.layer == 0 and task.stage.stream not in session.passes:
        for row in task.rows:
            session.state.begin(row)
        session.passes[task.stage.stream] = SpeculatingForward(session, task.rows)
    found: SpeculatingForward = session.passes[task.stage.stream]
    return found


@action("proxy")
def proxy(session: Session, task: Task) -> None:
    """Entries of this layer, picked by queries that are speculated from what entered the layer before.

    A stage that leads runs before that layer, whose input is then the newest there is.
    """
    forward, pools, layer = step_pass(session, task), session.pools, task.layer
    written = task.writes("picked") or task.writes("indices", buffer=Buffer.RING)
    task.require(task.reads("partial", Region.PREFIX) and written, "scoring partial keys")
    assert pools.partial is not None
    leads = task.stage.lead > 0 or forward.previous is None
    hidden = forward.hidden if leads else forward.previous
    assert hidden is not None
    queries = speculated_queries(session.model, layer, forward, hidden)
    rows = forward.rows
    picked = [pools.partial.pick(layer, row.slot, queries[i], row.prefix, row.to_select) for i, row in enumerate(rows)]
    pools.indices[layer, rows[0].slot] = as_selection(picked)
    width = pools.partial.columns[layer].shape[-1] * session.entry_bytes() // (2 * session.model.shape.head_dim)
    task.num_bytes += sum(row.prefix for row in rows) * width


def as_selection(picked: Sequence[Tensor]) -> Selection:
    """Positions ``[kv, k]`` of each row as the gather kernel takes them, padded to the longest."""
    heads, longest = picked[0].shape[0], max(each.shape[1] for each in picked)
    indices = np.full((len(picked), heads, longest), -1, np.int32)
    counts = np.zeros((len(picked), heads), np.int32)
    for i, each in enumerate(picked):
        indices[i, :, : each.shape[1]] = each.cpu().numpy()
        counts[i] = each.shape[1]
    return Selection(np.empty((0,), np.float32), indices, counts, np.zeros_like(counts, np.uint8))


@action("fetch_rows")
def fetch_rows(session: Session, task: Task) -> None:
    """Picked entries, row by row, from host memory to where the stage declares them."""
    known = task.reads("picked") or task.reads("indices") or task.reads("indices", buffer=Buffer.RING)
    task.require(task.reads("full", Region.PREFIX) and known, "fetching picked entries")
    rows = task.rows
    found = session.pools.indices[task.layer, rows[0].slot]
    full = session.pools.hosts["full"]
    dims = (*found.indices.shape, full.pages.head_dim)
    keys, values = (torch.empty(dims, dtype=session.model.kv_dtype) for _ in range(2))
    full.gather(task.layer, [row.slot for row in rows], found, keys, values, session.threads)
    for i, row in enumerate(rows):
        span = slice(0, row.to_select)
        moved = KV(*(part[i : i + 1, :, span].to(session.device) for part in (keys, values)))
        task.num_bytes += moved.num_bytes
        land_selected(session, task, [row], moved, torch.from_numpy(found.indices[i : i + 1, :, span]))


@action("step_layer")
def step_layer(session: Session, task: Task) -> None:
    """A layer of a step over what is in its place of the ring: the picked entries, or the whole prefix."""
    forward, ring = step_pass(session, task), session.pools.stores["fetched"]
    task.require(task.reads("fetched", buffer=Buffer.RING), "reading the fetched layer")
    picks = session.pools.partial is not None
    lengths = [row.to_select if picks else row.prefix for row in forward.rows]
    q, own = forward.project(task.layer)
    forward.keep_completed(task, task.layer, own)
    at = [ring.row(row.slot, task.turn % ring.buffers) for row in forward.rows]
    prefix = attend_ragged(q, ring.view(task.layer, at, max(lengths)), lengths)
    forward.previous = forward.hidden
    forward.attend(task.layer, q, own, prefix)
    task.num_bytes += (sum(lengths) + task.launch.shape.tokens) * session.entry_bytes()


@action("sparse_step")
def sparse_step(session: Session, task: Task) -> None:
    """A layer of the step over what has been fetched for it."""
    forward = step_pass(session, task)
    forward.run(task, task.layer)
    entries = task.launch.shape.selected_tokens + task.launch.shape.tokens
    task.num_bytes += entries * session.entry_bytes()
