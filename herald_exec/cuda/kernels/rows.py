"""Rows of paged KV in page-locked host memory, read by the device itself and put where attention reads them.

Neither a copy on the host nor one of the link's engines: each row of K and V crosses the link in a few requests of a
whole line, many of them under way at once. Few programs do all of it, because more would only wait, and would hold
places that a step's kernels want.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from herald_exec.kernels import PAGE_TOKENS

PROGRAMS = 48
"""Of 132 multiprocessors: 48 x 16 KiB under way are several times what the link holds (55 GB/s for about 2 us)."""
ROWS = 32
"""Rows of K, and of V, that a program asks for at once."""


# Counts change from block to block: a kernel of its own for those that 16 divides would be compiled while decoding
# (155 ms in an InfiniGen block of 380 on an H200, whose 6,560 entries were the first such number).
@triton.jit(do_not_specialize=["num_rows", "max_k", "pieces"])
def _fetch_rows(
    base,
    told,
    indices,
    out_k,
    out_v,
    slot_words,
    head_words,
    out_row_words,
    out_head_words,
    num_rows,
    kv_heads,
    max_k,
    pieces,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    host = base.to(tl.pointer_type(tl.int32))
    words = tl.arange(0, WIDTH)[None, :]
    for piece in range(tl.program_id(0), num_rows * kv_heads * pieces, tl.num_programs(0)):
        pair = piece // pieces
        row, head = pair // kv_heads, pair % kv_heads
        slot, place, count = tl.load(told + row), tl.load(told + num_rows + row), tl.load(told + 2 * num_rows + row)
        at = piece % pieces * N + tl.arange(0, N)
        real = at < count
        position = tl.load(indices + pair.to(tl.int64) * max_k + at, mask=real, other=0)
        # A page is a tile of keys and then one of values.
        first = slot.to(tl.int64) * slot_words + head.to(tl.int64) * head_words
        entry = first + (position // PAGE).to(tl.int64) * (2 * PAGE * W) + position % PAGE * W
        mask = real[:, None] & (words < W)
        k_at = host + entry[:, None] + words
        v_at = host + entry[:, None] + PAGE * W + words
        if WIDE:
            # A number that became a pointer tells the compiler of no alignment: threads that store 16 bytes would load
            # them in four, and each load would ask for all lines again.
            k_at, v_at = tl.multiple_of(k_at, [1, 16]), tl.multiple_of(v_at, [1, 16])
            k_at, v_at = tl.max_contiguous(k_at, [1, 4]), tl.max_contiguous(v_at, [1, 4])
        k = tl.load(k_at, mask=mask, other=0)
        v = tl.load(v_at, mask=mask, other=0)
        to = place.to(tl.int64) * out_row_words + head.to(tl.int64) * out_head_words + at[:, None].to(tl.int64) * W
        tl.store(out_k + to + words, k, mask=mask)
        tl.store(out_v + to + words, v, mask=mask)


def fetch_rows(
    address: int,
    told: Tensor,
    indices: Tensor,
    out: tuple[Tensor, Tensor],
    slot_bytes: int,
    head_bytes: int,
    *,
    programs: int = PROGRAMS,
    at_once: int = ROWS,
) -> None:
    """Put rows of K and V at ``indices`` into the first entries of storage rows.

    Parameters
    ----------
    address
        Of a layer's pages ``[slot, kv, page, 2, 64, d]`` in memory that the device can read; ``slot_bytes`` and
        ``head_bytes`` are their strides.
    told
        Per row of the batch its slot, its storage row and how many entries it takes, int32 ``[3, R]``.
    indices
        Positions, int32 ``[R, kv, max k]``.
    out
        Keys and values of a layer of a pool ``[rows, kv, capacity, d]``, each row contiguous.
    programs, at_once
        How many programs share the work, and how many rows of K, and of V, each asks for at once: a power of 2.
    """
    rows, heads, max_k = indices.shape
    if not rows or not max_k:
        return
    k, v = (part.view(torch.int32) for part in out)
    width = k.shape[-1]
    pieces = triton.cdiv(max_k, at_once)
    _fetch_rows[(min(programs, rows * heads * pieces),)](
        address,
        told,
        indices,
        k,
        v,
        slot_bytes // 4,
        head_bytes // 4,
        k.stride(0),
        k.stride(1),
        rows,
        heads,
        max_k,
        pieces,
        W=width,
        WIDTH=triton.next_power_of_2(width),
        PAGE=PAGE_TOKENS,
        N=at_once,
        WIDE=width % 4 == 0 and all(number % 16 == 0 for number in (address, slot_bytes, head_bytes)),
    )
