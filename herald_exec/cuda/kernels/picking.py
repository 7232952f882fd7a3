"""The largest weights of each prefix, by counting: no sort, and of equal weights the lower position.

A weight's bits, turned into an unsigned number that orders as the weight does, are found a byte at a time from the top:
a histogram of the byte over all weights that agree with what is known so far says which byte the k-th largest has. Four
readings of the weights later the k-th largest is known, and a fifth writes the positions in their order. The weights
have just been written, so they are read out of the L2.
"""

import triton
import triton.language as tl
from torch import Tensor

from herald_exec.cuda.lanes import NOWHERE

TILE = 8192
"""Weights that a program reads at once."""


@triton.jit
def _ordered(weights, n, capacity):
    """Weights as unsigned numbers of the same order; NaN above all, and both zeros alike (as ``torch.topk``).

    Bounded by the capacity, which 16 divides, and not by the prefix: then a load takes 16 bytes.
    """
    value = tl.load(weights + n, mask=n < capacity, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    bits = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(value != value, 0xFFFFFFFF, bits).to(tl.uint32)


@triton.jit
def _pick(weights, lengths, counts, out, kv_heads, capacity, most, EMPTY: tl.constexpr, N: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    lane = pair // kv_heads
    length = tl.load(lengths + lane)
    count = tl.minimum(tl.load(counts + lane), length)
    weights += pair * capacity
    out += pair * most
    known = tl.full([], 0, tl.uint32)
    left = count
    if count > 0:
        digits = tl.arange(0, 256)
        for turn in tl.static_range(4):
            shift = 24 - 8 * turn
            found = tl.zeros([256], tl.int32)
            for start in range(0, length, N):
                n = start + tl.arange(0, N)
                key = _ordered(weights, n, capacity)
                alike = n < length
                if turn:
                    alike &= (key >> (shift + 8)) == known
                found += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=alike)
            above = tl.sum(found, axis=0) - tl.cumsum(found, axis=0)
            # The byte of which more are needed than lie above it, and no more than lie above it and in it.
            its = (above < left) & (left <= above + found)
            known = (known << 8) | tl.sum(tl.where(its, digits, 0), axis=0).to(tl.uint32)
            left -= tl.sum(tl.where(its, above, 0), axis=0)
        larger, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, length, N):
            n = start + tl.arange(0, N)
            key = _ordered(weights, n, capacity)
            more = ((n < length) & (key > known)).to(tl.int32)
            same = ((n < length) & (key == known)).to(tl.int32)
            # Of equal ones the first ``left``.
            before = equal + tl.cumsum(same, axis=0) - same
            taken = (more > 0) | ((same > 0) & (before < left))
            place = larger + tl.cumsum(more, axis=0) - more + tl.minimum(before, left)
            tl.store(out + place, n, mask=taken)
            larger += tl.sum(more, axis=0)
            equal += tl.sum(same, axis=0)
    for start in range(0, most, N):
        at = start + tl.arange(0, N)
        tl.store(out + at, tl.full([N], EMPTY, tl.int32), mask=(at >= count) & (at < most))


def pick_largest(weights: Tensor, lengths: Tensor, counts: Tensor, out: Tensor) -> None:
    """Ascending positions of each prefix's largest weights into ``out``, and ``NOWHERE`` behind them.

    Parameters
    ----------
    weights
        ``[lanes, kv, S]`` fp32, contiguous; what lies behind a prefix does not count. NaN counts as the largest.
    lengths, counts
        Per lane its prefix, and how many positions of it are taken (all where it has no more), int32.
    out
        ``[lanes, kv, k]`` int32, contiguous, k at least the largest count.
    """
    lanes, kv, capacity = weights.shape
    if not lanes or not out.shape[2]:
        return
    tile = min(TILE, max(256, triton.next_power_of_2(capacity)))
    # Every thread has eight weights of its own. A whole multiprocessor's threads: there are few rows, each read alone.
    warps = max(1, min(32, tile // 256))
    args = (weights, lengths, counts, out, kv, capacity, out.shape[2])
    _pick[(lanes * kv,)](*args, EMPTY=NOWHERE, N=tile, num_warps=warps)
