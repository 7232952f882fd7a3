"""Speculated attention weights of every prefix position, summed over a block's queries, without the scores in memory.

Two passes over the partial keys, which are a third of the keys in size: the log-sum-exp of each query, then the weights
of each position. Scores of 4 blocks of 32 tokens over 32K positions would be 268 MB a layer, written and read thrice.

Partial keys lie column by column: 38 numbers a position, 76 bytes, would be read two bytes at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
TILE = 128
"""Positions of a program's tile."""
TILES = 8
"""Tiles that a program reads one after another."""


@triton.jit
def _load_queries(queries, base, M, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    return tl.load(queries + base + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0.0)


@triton.jit
def _load_keys(keys, base, n, capacity, column_stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Keys of a tile, ``[BLOCK_C, N]``.

    Bounded by the capacity, which 16 divides, and not by the prefix: then a load takes 16 bytes.
    """
    c = tl.arange(0, BLOCK_C)
    at = c[:, None] * column_stride + n[None, :]
    return tl.load(keys + base + at, mask=(c[:, None] < C) & (n[None, :] < capacity), other=0.0)


@triton.jit
def _log_sums(queries, keys, rows, lengths, out, row_stride, head_stride, column_stride, kv_heads, M, scale, capacity,
              C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, head = pair // kv_heads, pair % kv_heads
    length = tl.load(lengths + lane)
    key_base = tl.load(rows + lane).to(tl.int64) * row_stride + head * head_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    q = _load_queries(queries, pair * M * C, M, C, BLOCK_M, BLOCK_C)
    low = split * COUNT * N
    for start in range(low, tl.minimum(low + COUNT * N, length), N):
        n = start + tl.arange(0, N)
        k = _load_keys(keys, key_base, n, capacity, column_stride, C, BLOCK_C)
        s = tl.dot(q, k, input_precision=PRECISION) * scale
        s = tl.where((n < length)[None, :], s, float("-inf"))
        newer = tl.maximum(top, tl.max(s, axis=1))
        total = total * tl.exp2(top - newer) + tl.sum(tl.exp2(s - newer[:, None]), axis=1)
        top = newer
    m = tl.arange(0, BLOCK_M)
    found = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + (pair * tl.num_programs(1) + split) * M + m, found, mask=m < M)


@triton.jit
def _weights(queries, keys, rows, lengths, sums, out, row_stride, head_stride, column_stride, kv_heads, M, scale,
             capacity, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, N: tl.constexpr,
             COUNT: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, head = pair // kv_heads, pair % kv_heads
    length = tl.load(lengths + lane)
    m, low = tl.arange(0, BLOCK_M), split * COUNT * N
    end = tl.minimum(low + COUNT * N, capacity)
    if low < length:
        key_base = tl.load(rows + lane).to(tl.int64) * row_stride + head * head_stride
        q = tl.trans(_load_queries(queries, pair * M * C, M, C, BLOCK_M, BLOCK_C))
        p = tl.arange(0, PARTS)
        real = (p[:, None] < SPLITS) & (m[None, :] < M)
        part = tl.load(sums + (pair * SPLITS + p[:, None]) * M + m[None, :], mask=real, other=float("-inf"))
        top = tl.max(part, axis=0)
        top = tl.where(m < M, top, 0.0)
        total = tl.sum(tl.exp2(part - top[None, :]), axis=0)
        # A query that is none weighs nothing.
        log_sum = tl.where(m < M, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
        for start in range(low, end, N):
            n = start + tl.arange(0, N)
            k = _load_keys(keys, key_base, n, capacity, column_stride, C, BLOCK_C)
            # Positions by queries: the sum over queries then stays within a warp.
            s = tl.dot(tl.trans(k), q, input_precision=PRECISION) * scale
            each = tl.sum(tl.exp2(s - log_sum[None, :]), axis=1)
            tl.store(out + pair * capacity + n, tl.where(n < length, each, -1.0), mask=n < capacity)
    else:
        for start in range(low, end, N):
            n = start + tl.arange(0, N)
            tl.store(out + pair * capacity + n, tl.full([N], -1.0, tl.float32), mask=n < capacity)


def prefix_importance(queries: Tensor, keys: Tensor, rows: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax weights over a prefix, summed over queries: ``[lanes, kv, S]`` fp32, -1 behind the prefix.

    Parameters
    ----------
    queries
        ``[lanes, kv, M, c]``, contiguous.
    keys
        Keys of a layer by columns ``[rows, kv, c, S]``, each column contiguous.
    rows, lengths
        Per lane its storage row and its prefix, int32.
    scale
        Factor of the products.
    """
    lanes, kv, m, c = queries.shape
    capacity = keys.shape[3]
    assert keys.stride(3) == 1, "a column's positions must lie together"
    assert queries.is_contiguous()
    splits = triton.cdiv(capacity, TILE * TILES)
    parts = torch.empty(lanes, kv, splits, m, dtype=torch.float32, device=queries.device)
    out = torch.empty(lanes, kv, capacity, dtype=torch.float32, device=queries.device)
    tiles = {
        "C": c,
        "BLOCK_M": max(16, triton.next_power_of_2(m)),
        "BLOCK_C": max(16, triton.next_power_of_2(c)),
        "N": TILE,
        "COUNT": TILES,
        "PRECISION": "ieee" if queries.dtype is torch.float32 else "tf32",
        "num_warps": 8,
        # Two programs a multiprocessor. In fp32, which multiplies without tensor cores, it would not do.
        **({} if queries.dtype is torch.float32 else {"maxnreg": 128}),
    }
    common = (*keys.stride()[:3], kv, m, scale * _LOG2_E, capacity)
    grid, joined = (lanes * kv, splits), {"SPLITS": splits, "PARTS": triton.next_power_of_2(splits)}
    _log_sums[grid](queries, keys, rows, lengths, parts, *common, **tiles)
    _weights[grid](queries, keys, rows, lengths, parts, out, *common, **joined, **tiles)
    return out
