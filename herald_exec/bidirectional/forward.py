"""One forward over any set of positions of a ragged batch, against keys of all positions."""

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.models.base import BlockModel

LOGIT_ROWS = 1024
"""Positions whose logits exist at a time: 1,024 x 126,464 in fp32 are 0.5 GB."""


def forward_positions(
    model: BlockModel, kv: VersionedKV, tokens: Tensor, forwarded: Tensor, end: Tensor, round_number: int
) -> Tensor:
    """Compute hidden states of ``forwarded [R, L]`` and write their K and V over the cached ones.

    Every query sees all real positions of its row, the forwarded ones as computed now. Linear layers run on the
    forwarded positions of all rows joined; only attention is padded, to the longest row.

    Returns
    -------
    Tensor
        ``[N, H]`` in the order of ``forwarded.nonzero()``.
    """
    rows, positions = forwarded.nonzero(as_tuple=True)
    num_rows, width = tokens.shape
    slot = (forwarded.cumsum(dim=1) - 1)[rows, positions]
    longest = int(forwarded.sum(dim=1).max())
    # Without padding among the keys no mask is passed, which leaves fast kernels free.
    lengths = None if bool((end == width).all()) else end
    hidden = model.embed(tokens[rows, positions])
    rotary = model.rotary(positions)
    for layer in range(model.shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)
        kv.write(layer, rows, positions, k, v, round_number)
        queries = q.new_zeros(num_rows, longest, *q.shape[1:])
        queries[rows, slot] = q
        attention = attend(queries, kv.keys[layer], kv.values[layer], lengths=lengths)
        hidden = model.finish(layer, hidden, attention[rows, slot])
    return hidden


def readable(forwarded: Tensor, *, shifted: bool) -> Tensor:
    """``[R, L]``: positions whose prediction a forward gives; with shifted logits that is the next position's.

    Position 0 has no position before it and keeps its own logits (Dream).
    """
    if not shifted:
        return forwarded
    return torch.cat([forwarded[:, :1], forwarded[:, :-1]], dim=1)


def read_hidden(hidden: Tensor, forwarded: Tensor, read: Tensor, *, shifted: bool) -> Tensor:
    """Hidden states ``[M, H]`` that predict the positions ``read [R, L]``, in the order of ``read.nonzero()``."""
    index = (forwarded.flatten().cumsum(dim=0) - 1).view_as(forwarded)
    rows, positions = read.nonzero(as_tuple=True)
    source = (positions - 1).clamp_min(0) if shifted else positions
    return hidden[index[rows, source]]
