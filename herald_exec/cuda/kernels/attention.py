"""Attention of whole blocks to a pool and to themselves, in one pass over the keys.

A **lane** is one group of B tokens: a row's block, or the draft of it. Its keys are ``lengths[lane]`` entries of the
pool's storage row ``rows[lane]`` and its own B; all of them are seen by all of its queries, so prefix and block are one
key range and need no mask but the length. The G heads of a group are query rows of one product: a KV head is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on an H100 or H200: three stages of 128 keys in bf16 take 224 KiB of it."""


@triton.jit
def _step(q, k, v, m, total, acc, real, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of keys into the running softmax (base 2; ``q`` holds the scale)."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(real[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, axis=1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(m - shift)
    total = total * decay + tl.sum(p, axis=1)
    acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _attend(
    queries,
    keys,
    values,
    own_k,
    own_v,
    rows,
    lengths,
    out,
    part_out,
    part_lse,
    row_stride,
    head_stride,
    kv_heads,
    scale,
    half,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    M: tl.constexpr = B * G
    pair = tl.program_id(0).to(tl.int64)
    if half > 0:
        # Neighbouring programs take lanes i and i + half, which read the same keys: the second finds them in the L2.
        pair = (pair // 2 // kv_heads + pair % 2 * half) * kv_heads + pair // 2 % kv_heads
    lane, head = pair // kv_heads, pair % kv_heads
    split = tl.program_id(2)
    m_rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)
    q_at = (pair * M + m_rows)[:, None] * D + columns[None, :]
    q = tl.load(queries + q_at, mask=(m_rows < M)[:, None], other=0.0)
    q = (q.to(tl.float32) * scale).to(q.dtype)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    length = tl.load(lengths + lane)
    storage = tl.load(rows + lane).to(tl.int64)
    base = storage * row_stride + head * head_stride
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    low = split * chunk
    high = tl.minimum(low + chunk, length)
    whole = low + tl.maximum(high - low, 0) // BLOCK_N * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    for start in range(low, whole, BLOCK_N):
        at = base + (start + n)[:, None] * D + columns[None, :]
        m, total, acc = _step(q, tl.load(keys + at), tl.load(values + at), m, total, acc, n < BLOCK_N, False, PRECISION)
    if whole < high:
        real = whole + n < high
        at = base + (whole + n)[:, None] * D + columns[None, :]
        k = tl.load(keys + at, mask=real[:, None], other=0.0)
        v = tl.load(values + at, mask=real[:, None], other=0.0)
        m, total, acc = _step(q, k, v, m, total, acc, real, True, PRECISION)
    if split == SPLITS - 1:
        o = tl.arange(0, OWN)
        at = (pair * B + o)[:, None] * D + columns[None, :]
        k = tl.load(own_k + at, mask=(o < B)[:, None], other=0.0)
        v = tl.load(own_v + at, mask=(o < B)[:, None], other=0.0)
        m, total, acc = _step(q, k, v, m, total, acc, o < B, True, PRECISION)
    some = tl.where(total > 0, total, 1.0)
    acc = acc / some[:, None]
    if SPLITS == 1:
        token, head_of = lane * B + m_rows // G, head * G + m_rows % G
        at = (token * kv_heads * G + head_of)[:, None] * D + columns[None, :]
        tl.store(out + at, acc, mask=(m_rows < M)[:, None])
    else:
        part = (pair * SPLITS + split) * M + m_rows
        tl.store(part_out + part[:, None] * D + columns[None, :], acc, mask=(m_rows < M)[:, None])
        lse = tl.where(total > 0, m + tl.log2(some), float("-inf"))
        tl.store(part_lse + part, lse, mask=m_rows < M)


@triton.jit
def _combine(
    part_out,
    part_lse,
    out,
    kv_heads,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    M: tl.constexpr = B * G
    pair = tl.program_id(0).to(tl.int64)
    lane, head = pair // kv_heads, pair % kv_heads
    m_rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)
    real = m_rows < M
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(part_lse + (pair * SPLITS + split) * M + m_rows, mask=real, other=0.0))
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for split in range(SPLITS):
        part = (pair * SPLITS + split) * M + m_rows
        weight = tl.exp2(tl.load(part_lse + part, mask=real, other=0.0) - top)
        total += weight
        at = part[:, None] * D + columns[None, :]
        acc += weight[:, None] * tl.load(part_out + at, mask=real[:, None], other=0.0).to(tl.float32)
    token, head_of = lane * B + m_rows // G, head * G + m_rows % G
    at = (token * kv_heads * G + head_of)[:, None] * D + columns[None, :]
    tl.store(out + at, acc / total[:, None], mask=real[:, None])


def attend_lanes(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own: tuple[Tensor, Tensor],
    rows: Tensor,
    lengths: Tensor,
    *,
    splits: int = 1,
    paired: bool = False,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int = 8,
    num_stages: int | None = None,
) -> Tensor:
    """Attention of lanes to ``lengths`` entries of their storage rows and to their own block.

    Parameters
    ----------
    q
        Folded queries ``[lanes, kv, B * G, d]``.
    keys, values
        A layer of a pool, ``[rows, kv, capacity, d]``.
    own
        The lanes' own keys and values ``[lanes, kv, B, d]``.
    rows, lengths
        Per lane, int32.
    splits
        Parts of a lane's keys that are read by different multiprocessors.
    paired
        Lanes i and i + lanes / 2 belong to one row (a block and its draft), so they run side by side and the row's
        keys leave device memory once. Only the order of the programs depends on it.
    block_m, block_n
        Query rows and keys of a tile; ``None`` takes what was fastest on an H200. fp32 takes fewer keys (what fits),
        and so do fewer rows than 128, with which larger tiles were not measured.
    num_stages
        Tiles of keys on their way at a time; ``None``: three, or two where three do not fit a multiprocessor.

    Returns
    -------
    Tensor
        ``[lanes * B, heads * d]``, as the output projection reads it.
    """
    lanes, kv, m, dim = q.shape
    block = own[0].shape[2]
    group = m // block
    wide = q.dtype == torch.float32
    block_m = min(max(16, triton.next_power_of_2(m)), block_m or (64 if wide else 128))
    block_n = min(block_n or 64, 32 if wide else 128 if block_m >= 128 else 64)
    if num_stages is None:
        tiles_bytes = (3 * 2 * block_n + block_m) * dim * q.element_size()
        num_stages = 3 if tiles_bytes <= _SHARED_BYTES else 2
    out = q.new_empty(lanes * block, kv * group * dim)
    part_out, part_lse = out, out
    if splits > 1:
        part_out = q.new_empty(lanes * kv * splits, m, dim)
        part_lse = torch.empty(lanes * kv * splits, m, device=q.device, dtype=torch.float32)
    grid = (lanes * kv, triton.cdiv(m, block_m))
    _attend[(*grid, splits)](
        q,
        keys,
        values,
        *own,
        rows,
        lengths,
        out,
        part_out,
        part_lse,
        keys.stride(0),
        keys.stride(1),
        kv,
        dim**-0.5 * _LOG2_E,
        lanes // 2 if paired and lanes % 2 == 0 else 0,
        B=block,
        G=group,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        OWN=max(16, triton.next_power_of_2(block)),
        SPLITS=splits,
        PRECISION="ieee" if wide else "tf32",
        num_warps=num_warps if block_m * dim > 8192 else 4,
        num_stages=num_stages,
    )
    if splits > 1:
        _combine[grid](
            part_out, part_lse, out, kv, B=block, G=group, D=dim, BLOCK_M=block_m, SPLITS=splits, num_warps=4
        )
    return out
