"""Root-mean-square norms with the residual addition before them, and SiLU(gate) * up."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(hidden, delta, weight, out_hidden, out_normed, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(hidden + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        # The residual is kept in the model's type, and the norm is that of what is kept.
        x = x.to(out_hidden.dtype.element_ty).to(tl.float32)
        tl.store(out_hidden + row * size + columns, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_normed + row * size + columns, x * scale * w, mask=inside)


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``hidden + delta`` and its norm, ``[N, H]`` each; without ``delta`` the first is ``hidden`` itself."""
    rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    joined = hidden if delta is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        joined,
        normed,
        size,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return joined, normed


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of ``[N, 2 I]`` times the second: ``[N, I]``."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out
