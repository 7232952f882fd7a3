"""From final hidden states to a token and its confidence, without ever holding all logits.

The vocabulary is taken in chunks: one matmul, one reduction into a running maximum, sum of exponentials and best token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from herald_exec.footprint import LOGITS_AT_ONCE


@triton.jit
def _reduce(
    logits,
    top,
    total,
    best,
    token,
    first,
    forbidden,
    WIDTH: tl.constexpr,
    FIRST_CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m, s, b, t = float("-inf"), 0.0, float("-inf"), first
    if not FIRST_CHUNK:
        m, s = tl.load(top + row), tl.load(total + row)
        b, t = tl.load(best + row), tl.load(token + row).to(tl.int32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * WIDTH + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        high = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - high) + tl.sum(tl.exp(x - high), axis=0)
        m = high
        # A committed mask would look like an open position: it counts in the softmax and is never chosen.
        allowed = tl.where(first + columns == forbidden, float("-inf"), x)
        found = tl.max(allowed, axis=0)
        at = tl.argmax(allowed, axis=0)
        t = tl.where(found > b, first + start + at, t)
        b = tl.maximum(b, found)
    tl.store(top + row, m)
    tl.store(total + row, s)
    tl.store(best + row, b)
    tl.store(token + row, t.to(tl.int64))


class Head:
    """LM head over chunks of the vocabulary.

    Parameters
    ----------
    weight
        ``[V, H]``.
    rows
        Most positions of one call.
    forbidden
        Token that is never chosen; -1: none.
    chunk
        Vocabulary entries a time; a buffer ``[rows, chunk]`` is all that is held.
    """

    def __init__(self, weight: Tensor, rows: int, forbidden: int, chunk: int = LOGITS_AT_ONCE) -> None:
        self.weight = weight
        self.forbidden = forbidden
        self.chunk = min(chunk, weight.shape[0])
        device = weight.device
        self._logits = torch.empty(rows * self.chunk, device=device, dtype=torch.float32)
        self._top, self._total, self._best = (torch.empty(rows, device=device) for _ in range(3))
        self._token = torch.empty(rows, device=device, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._logits.nbytes + 3 * self._top.nbytes + self._token.nbytes

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Token (int64) and confidence (fp32) of ``normed [M, H]``; views that the next call overwrites."""
        rows, vocabulary = normed.shape[0], self.weight.shape[0]
        for first in range(0, vocabulary, self.chunk):
            width = min(self.chunk, vocabulary - first)
            logits = self._logits[: rows * width].view(rows, width)
            part = self.weight[first : first + width].T
            if normed.dtype == torch.float32:
                torch.mm(normed, part, out=logits)
            elif normed.is_cuda:
                torch.mm(normed, part, out_dtype=torch.float32, out=logits)
            else:
                torch.mm(normed.float(), part.float(), out=logits)
            _reduce[(rows,)](
                logits,
                self._top,
                self._total,
                self._best,
                self._token,
                first,
                self.forbidden,
                WIDTH=width,
                FIRST_CHUNK=first == 0,
                BLOCK=min(4096, triton.next_power_of_2(width)),
                num_warps=8,
            )
        confidence = torch.exp(self._best[:rows] - self._top[:rows]) / self._total[:rows]
        return self._token[:rows], confidence
