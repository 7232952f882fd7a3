"""A plain forward over whole sequences: prefill, and the reference that tests compare with.

No pool, no selection: every query sees what the model's attention rule lets it see.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from herald_exec.attention import attend, block_causal_mask
from herald_exec.models.base import BlockModel
from herald_pipeline.model import Attention

LayerHook = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called as ``hook(layer, q, k, v)`` once a layer's projections exist, before its attention."""


class SequenceForward(NamedTuple):
    """``hidden`` ``[R, L, H]`` and, per layer, keys and values ``[R, kv, L, d]``."""

    hidden: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def default_mask(model: BlockModel, positions: Tensor, block: int | None) -> Tensor | None:
    """Mask by the model's own rule; ``None`` when every position sees every other."""
    if model.shape.attention is Attention.BIDIRECTIONAL:
        return None
    return block_causal_mask(positions, positions, block or model.shape.block_length)


def forward(
    model: BlockModel,
    tokens: Tensor,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    block: int | None = None,
) -> SequenceForward:
    """Forward of whole rows, keeping all KV.

    Parameters
    ----------
    tokens
        ``[R, L]``.
    positions
        ``[L]``; 0..L-1 by default.
    mask
        Boolean ``[L, L]`` or ``[R, L, L]``; by default the model's own rule with ``block`` (or its
        block length).
    lengths
        ``[R]`` real tokens of each row, right-padded.
    """
    rows, length = tokens.shape
    if positions is None:
        positions = torch.arange(length, device=tokens.device)
    if mask is None:
        mask = default_mask(model, positions, block)
    rotary = model.rotary(positions.repeat(rows))
    hidden = model.embed(tokens.flatten())
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(model.shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)
        q = q.view(rows, length, *q.shape[1:])
        k = k.reshape(rows, length, *k.shape[1:]).transpose(1, 2)
        v = v.reshape(rows, length, *v.shape[1:]).transpose(1, 2)
        keys.append(k)
        values.append(v)
        attention = attend(q, k, v, mask=mask, lengths=lengths)
        hidden = model.finish(layer, hidden, attention.flatten(0, 1))
    return SequenceForward(hidden.view(rows, length, -1), keys, values)


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, block: int, chunk: int) -> Tensor:
    """Block-causal attention of one row, ``chunk`` queries at a time over the keys they may see.

    A chunk of one block needs no mask; a larger one masks only its own square, which never exceeds
    chunk x L.
    """
    length = q.shape[1]
    positions = torch.arange(length, device=q.device)
    out = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        mask = None
        if end - start > block:
            mask = block_causal_mask(positions[start:end], positions[:end], block)
        out.append(attend(q[:, start:end], k[:, :, :end], v[:, :, :end], mask=mask))
    return torch.cat(out, dim=1)


def prefill(
    model: BlockModel,
    tokens: Tensor,
    hook: LayerHook,
    *,
    block: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Forward of one prompt, layer by layer; each layer's q, k, v go to ``hook`` and are not kept.

    Positions start at 0. Memory is one layer's projections and one chunk's scores, whatever the
    number of layers.

    Parameters
    ----------
    tokens
        ``[L]``.
    hook
        Receives ``q [1, L, heads, d]`` and ``k, v [1, kv, L, d]`` of each layer.
    block
        Block length; the model's own by default.
    chunk
        Queries a time, a multiple of ``block``; by default one block on CUDA (no mask, the fastest
        kernel) and about 256 queries on the CPU.

    Returns
    -------
    Tensor
        Hidden states ``[L, H]``.
    """
    length = tokens.shape[0]
    block = block or model.shape.block_length
    if chunk is None:
        chunk = block if tokens.is_cuda else block * max(1, 256 // block)
    if model.shape.attention is Attention.BIDIRECTIONAL:
        block = chunk = length
    rotary = model.rotary(torch.arange(length, device=tokens.device))
    hidden = model.embed(tokens)
    for layer in range(model.shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)
        q, k, v = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        hook(layer, q, k, v)
        hidden = model.finish(layer, hidden, attend_in_chunks(q, k, v, block, chunk)[0])
    return hidden
