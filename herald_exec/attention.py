"""Attention of a few queries over ragged keys: one range, or parts merged by log-sum-exp.

Shapes, everywhere: queries ``[R, Lq, heads, d]``, keys and values ``[R, kv, Lk, d]`` (a pool's
layout: one KV head's rows lie together, which is how selection gathers them), results ``[R, Lq,
heads, d]``. Query head h reads KV head h // G. The G heads of a group are folded into the query
rows, so that a KV head is read once and not G times (three to four times the bandwidth of
``enable_gqa=True`` on an H200).

Masks are boolean, ``True`` = may look, and broadcast to ``[R, Lq, Lk]``.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

KEYS_AT_ONCE = 1024
"""Keys that the CPU scores at once.

Their scores, a few megabytes, stay near the core, and the allocator reuses their memory. Scores of a whole context (12
MiB for 32 queries of 12 heads over 8,192 keys) it may give back to the system after every call, depending on what the
process has freed before: 9,253 page faults a layer, by which its attention takes 75 ms in place of 46.
"""


class Partial(NamedTuple):
    """Attention over one part of the keys, with what is needed to join it to another part.

    ``output`` ``[R, Lq, heads, d]``; ``log_sum_exp`` ``[R, Lq, heads]`` in fp32 (fp64 for fp64
    input), minus infinity where a query saw no key.
    """

    output: Tensor
    log_sum_exp: Tensor


def length_mask(lengths: Tensor, num_keys: int) -> Tensor:
    """``[R, 1, Lk]``: key j of row r is real, j < lengths[r]."""
    return torch.arange(num_keys, device=lengths.device)[None, None, :] < lengths[:, None, None]


def block_causal_mask(query_positions: Tensor, key_positions: Tensor, block: int) -> Tensor:
    """``[..., Lq, Lk]``: a query sees its own block and all earlier ones.

    ``block`` 1 is the causal mask. Blocks are aligned to absolute positions: the tail of a prompt
    shares its block with the first masks.
    """
    return (key_positions // block)[..., None, :] <= (query_positions // block)[..., :, None]


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """``[R, Lq, kv * G, d]`` -> ``[R, kv, Lq * G, d]``."""
    rows, length, heads, dim = q.shape
    group = heads // kv_heads
    folded = q.view(rows, length, kv_heads, group, dim).transpose(1, 2)
    return folded.reshape(rows, kv_heads, length * group, dim)


def _unfold(out: Tensor, length: int) -> Tensor:
    """``[R, kv, Lq * G, ...]`` -> ``[R, Lq, kv * G, ...]``."""
    rows, kv_heads, folded, *rest = out.shape
    group = folded // length
    shaped = out.view(rows, kv_heads, length, group, *rest).transpose(1, 2)
    return shaped.reshape(rows, length, kv_heads * group, *rest)


def _fold_mask(mask: Tensor, group: int) -> Tensor:
    """``[R, Lq, Lk]`` -> ``[R, 1, Lq * G, Lk]``; a mask alike for all queries stays one row."""
    if mask.shape[1] == 1:
        return mask[:, None]
    return mask.repeat_interleave(group, dim=1)[:, None]


def _combined_mask(q: Tensor, k: Tensor, lengths: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Join real keys and ``mask`` to ``[R or 1, Lq or 1, Lk]``; ``None`` when all is seen."""
    if mask is not None and mask.dim() == 2:
        mask = mask[None]
    if lengths is not None:
        real = length_mask(lengths, k.shape[2])
        mask = real if mask is None else mask & real
    return mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention over one range of keys, scaled by 1/sqrt(d).

    Parameters
    ----------
    q, k, v
        Queries ``[R, Lq, heads, d]``, keys and values ``[R, kv, Lk, d]``.
    lengths
        ``[R]``, the real keys of each row; the rest is padding. ``None``: all are real, which
        leaves CUDA free to take an unmasked kernel.
    mask
        Boolean ``[Lq, Lk]`` or ``[R or 1, Lq or 1, Lk]``, ``True`` = may look.

    Returns
    -------
    Tensor
        ``[R, Lq, heads, d]``; zero where a query sees no key.
    """
    group = q.shape[2] // k.shape[1]
    seen = _combined_mask(q, k, lengths, mask)
    folded_mask = None if seen is None else _fold_mask(seen, group)
    out = functional.scaled_dot_product_attention(_fold(q, k.shape[1]), k, v, attn_mask=folded_mask)
    return _unfold(out, q.shape[1])


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Partial:
    """:func:`attend` over one part of the keys, with the log-sum-exp for :func:`merge`.

    Written with matmul and softmax, so that it is alike on every device; scores are held as ``[R,
    heads, Lq, Lk]`` in fp32, on the CPU of :data:`KEYS_AT_ONCE` keys at a time. Parameters as for
    :func:`attend`; no key at all (Lk = 0) is allowed.
    """
    rows, length, heads, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if keys == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        return Partial(torch.zeros_like(q), q.new_full((rows, length, heads), float("-inf"), dtype=wide))
    folded = _fold(q, kv_heads) * dim**-0.5
    seen = _combined_mask(q, k, lengths, mask)
    hidden = None if seen is None else ~_fold_mask(seen, heads // kv_heads)
    if q.is_cuda:
        out, lse = _attend_whole(folded, k, v, hidden)
        return Partial(_unfold(out, length), _unfold(lse, length))
    parts = []
    for start in range(0, keys, KEYS_AT_ONCE):
        at = slice(start, start + KEYS_AT_ONCE)
        out, lse = _attend_in_place(folded, k[:, :, at], v[:, :, at], None if hidden is None else hidden[..., at])
        parts.append(Partial(_unfold(out, length), _unfold(lse, length)))
    if len(parts) == 1:
        return parts[0]
    return Partial(merge(*parts), torch.stack([part.log_sum_exp for part in parts]).logsumexp(dim=0))


def _attend_whole(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of folded, scaled queries, in the launches that GPU profiles were measured with."""
    scores = _scores(q, k, hidden)
    lse = torch.logsumexp(scores, dim=-1)
    # A query without a key has lse = -inf; shifting by 0 there gives 0 instead of NaN.
    shift = torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))
    return torch.exp(scores - shift[..., None]).to(v.dtype) @ v, lse


def _attend_in_place(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`_attend_whole` in one buffer for scores and weights, with one exponential in place of two."""
    scores = _scores(q, k, hidden)
    top = scores.amax(dim=-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    total = scores.sub_(top).exp_().sum(dim=-1, keepdim=True)
    lse = (total.log() + top)[..., 0]
    return scores.div_(total.clamp_min(torch.finfo(total.dtype).tiny)).to(v.dtype) @ v, lse


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """``[R, kv, Lq * G, Lk]`` in fp32 (fp64 for fp64 input), minus infinity where ``hidden``."""
    scores = q @ k.transpose(-2, -1)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def merge(*parts: Partial) -> Tensor:
    """Attention over the union of disjoint parts: weights exp(lse_i) / sum exp(lse).

    A query that no part gave a key comes out as zero.
    """
    lse = torch.stack([part.log_sum_exp for part in parts])
    top = lse.amax(dim=0)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = torch.exp(lse - top)
    weights = weights / weights.sum(dim=0).clamp_min(torch.finfo(weights.dtype).tiny)
    outputs = torch.stack([part.output for part in parts])
    return (weights[..., None] * outputs.to(weights.dtype)).sum(dim=0).to(outputs.dtype)


def attend_two_part(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    *,
    prefix_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> Tensor:
    """Attend to prefix (sparse or full pool) and block apart: equal to one softmax over both.

    ``prefix`` and ``block`` are (keys, values); ``prefix_lengths`` ``[R]`` may hold zeros.
    """
    return merge(
        attend_partial(q, *prefix, lengths=prefix_lengths),
        attend_partial(q, *block, mask=block_mask),
    )
