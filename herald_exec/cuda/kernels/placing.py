"""Joined projections of Q, K and V, each part normed, rotated and put where it is read next: see :mod:`.attention`."""

import triton
import triton.language as tl
from torch import Tensor

from herald_exec.models.layers import Rotary


@triton.jit
def _head_tile(
    joined,
    weight,
    cos,
    sin,
    token,
    first,
    num_heads,
    width,
    half,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Heads [first, first + num_heads) of a token, normed and rotated: ``[HEADS, D]`` fp32."""
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, D)[None, :]
    base = joined + token * width + (first + heads) * D
    x = tl.load(base + columns, mask=heads < num_heads, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
        x = x * scale[:, None] * tl.load(weight + columns).to(tl.float32)
    if ROTATE:
        # Half-split pairs (i, i + half) of the first 2 * half dimensions; the others pass.
        turned = columns < 2 * half
        low = columns < half
        partner = tl.where(low, columns + half, tl.where(turned, columns - half, columns))
        y = tl.load(base + partner, mask=heads < num_heads, other=0.0).to(tl.float32)
        if NORM:
            y = y * scale[:, None] * tl.load(weight + partner).to(tl.float32)
        angle = token * half + tl.where(low, columns, columns - half)
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        x = x * c + tl.where(low, -y, y) * s
    return x


@triton.jit
def _place(
    joined,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    own_k,
    own_v,
    pool_k,
    pool_v,
    pool_rows,
    pool_starts,
    pool_row_stride,
    pool_head_stride,
    out_k,
    out_v,
    out_rows,
    out_row_stride,
    out_head_stride,
    num_heads,
    kv_heads,
    half,
    eps,
    B: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    NORM: tl.constexpr,
    TO_POOL: tl.constexpr,
    TO_OUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane, place = token // B, token % B
    width = (num_heads + 2 * kv_heads) * D
    columns = tl.arange(0, D)[None, :]
    q = _head_tile(joined, q_weight, cos, sin, token, 0, num_heads, width, half, eps, D, HEADS, NORM, True)
    heads = tl.arange(0, HEADS)[:, None]
    q_row = (lane * kv_heads + heads // G) * B * G + place * G + heads % G
    tl.store(q_out + q_row * D + columns, q, mask=heads < num_heads)
    k = _head_tile(joined, k_weight, cos, sin, token, num_heads, kv_heads, width, half, eps, D, KV, NORM, True)
    v = _head_tile(
        joined, k_weight, cos, sin, token, num_heads + kv_heads, kv_heads, width, half, eps, D, KV, False, False
    )
    heads = tl.arange(0, KV)[:, None]
    real = heads < kv_heads
    own = ((lane * kv_heads + heads) * B + place) * D + columns
    tl.store(own_k + own, k, mask=real)
    tl.store(own_v + own, v, mask=real)
    if TO_POOL:
        row = tl.load(pool_rows + lane).to(tl.int64)
        start = tl.load(pool_starts + lane)
        at = row * pool_row_stride + heads * pool_head_stride + (start + place) * D + columns
        tl.store(pool_k + at, k, mask=real & (row >= 0))
        tl.store(pool_v + at, v, mask=real & (row >= 0))
    if TO_OUT:
        row = tl.load(out_rows + lane).to(tl.int64)
        at = row * out_row_stride + heads * out_head_stride + place * D + columns
        tl.store(out_k + at, k, mask=real & (row >= 0))
        tl.store(out_v + at, v, mask=real & (row >= 0))


def place_heads(
    joined: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotary: Rotary,
    eps: float,
    lanes: int,
    heads: tuple[int, int],
    pool: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-head norms and RoPE of a joined projection, each part to where it is read next.

    Parameters
    ----------
    joined
        ``[lanes * B, (heads + 2 kv) d]``: Q, K, V.
    heads
        Query heads and KV heads.
    pool
        Keys and values of a layer of a pool ``[rows, kv, capacity, d]``, and per lane the storage row (-1: none) and
        the first entry that takes the lane's KV, int32.
    out
        The same for a buffer of whole blocks, from entry 0 on: keys, values, rows.

    Returns
    -------
    tuple of Tensor
        Folded queries ``[lanes, kv, B * G, d]`` and the lanes' own keys and values ``[lanes, kv, B, d]``.
    """
    tokens = joined.shape[0]
    num_heads, kv = heads
    block, dim, group = tokens // lanes, joined.shape[1] // (num_heads + 2 * kv), num_heads // kv
    q = joined.new_empty(lanes, kv, block * group, dim)
    own_k, own_v = (joined.new_empty(lanes, kv, block, dim) for _ in "kv")
    pool_k, pool_v, pool_rows, pool_starts = pool if pool is not None else (own_k, own_v, own_k, own_k)
    out_k, out_v, out_rows = out if out is not None else (own_k, own_v, own_k)
    norm = q_norm is not None and k_norm is not None
    _place[(tokens,)](
        joined,
        q_norm if norm else joined,
        k_norm if norm else joined,
        rotary.cos,
        rotary.sin,
        q,
        own_k,
        own_v,
        pool_k,
        pool_v,
        pool_rows,
        pool_starts,
        pool_k.stride(0),
        pool_k.stride(1),
        out_k,
        out_v,
        out_rows,
        out_k.stride(0),
        out_k.stride(1),
        num_heads,
        kv,
        rotary.cos.shape[1],
        eps,
        B=block,
        D=dim,
        G=group,
        HEADS=triton.next_power_of_2(num_heads),
        KV=triton.next_power_of_2(kv),
        NORM=norm,
        TO_POOL=pool is not None,
        TO_OUT=out is not None,
        num_warps=4,
    )
    return q, own_k, own_v
