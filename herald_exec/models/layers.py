"""The parts of a transformer layer as functions: norm, rotary embedding, SwiGLU, experts.

Nothing here reads a value back to the host on CUDA, so that a step can be captured in a graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from herald_pipeline.model import MoeShape


class Rotary(NamedTuple):
    """Cosines and sines of positions, ``[N, rotary_dim / 2]`` each, used by all layers."""

    cos: Tensor
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (per head when x is ``[N, heads, d]``)."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary_table(positions: Tensor, rotary_dim: int, theta: float) -> Rotary:
    """Angles position * theta**(-2i / rotary_dim), in fp32."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    inverse_frequency = 1.0 / theta ** (exponents / rotary_dim)
    angles = positions.to(torch.float32)[:, None] * inverse_frequency
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the first ``rotary_dim`` dimensions of ``[N, heads, d]``.

    Pairs are half-split: (i, i + rotary_dim / 2). The other dimensions pass through (LLaDA2 turns
    the first half of a head). Computed in fp32.
    """
    half = rotary.cos.shape[-1]
    cos, sin = rotary.cos[:, None, :], rotary.sin[:, None, :]
    wide = x[..., : 2 * half].to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide[..., :half], wide[..., half:]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1) if x.shape[-1] > 2 * half else turned


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up, the two halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def route(logits: Tensor, bias: Tensor | None, moe: MoeShape) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights.

    Group-limited (LLaDA2): a group's score is the sum of its two largest biased scores; only the
    experts of the best ``groups_per_token`` groups compete. The bias decides *who*, never *how
    much*: weights are the unbiased scores.

    Parameters
    ----------
    logits
        ``[N, experts]`` in fp32 (in bf16 near ties route differently).
    bias
        ``[experts]``, or ``None``.

    Returns
    -------
    tuple of Tensor
        Expert ids and fp32 weights, ``[N, experts_per_token]`` each.
    """
    scores = logits.sigmoid() if moe.gate == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if moe.num_groups > 1:
        grouped = choice.view(-1, moe.num_groups, moe.num_experts // moe.num_groups)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = group_scores.topk(moe.groups_per_token, dim=-1).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, value=True)
        choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(moe.experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if moe.normalise_weights:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * moe.routed_scaling


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[e-1], ends[e]) of ``x`` ``[M, in]`` times expert e's ``weight`` ``[E, out, in]``.

    One grouped matmul on CUDA, which knows bf16 only; elsewhere a loop over the experts that have rows.
    """
    if x.is_cuda and x.dtype is torch.bfloat16:
        return functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].T, out=out[start:end])
        start = end
    return out


def experts_forward(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's experts, ``[N, H]``.

    Tokens are sorted by expert, so each expert's weights are read once; results are put back by a
    gather and summed in a fixed order (no atomics), so that the same batch gives the same bits.
    """
    num_tokens, per_token = experts.shape
    flat = experts.flatten()
    sorted_experts, order = flat.sort(stable=True)
    bounds = torch.arange(gate_up.shape[0], device=x.device, dtype=flat.dtype)
    ends = torch.searchsorted(sorted_experts, bounds, right=True).to(torch.int32)
    hidden = swiglu(grouped_linear(x[order // per_token], gate_up, ends))
    out = grouped_linear(hidden, down, ends)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    per_expert = out[position].view(num_tokens, per_token, -1)
    return (per_expert.to(weights.dtype) * weights[..., None]).sum(dim=1).to(x.dtype)
