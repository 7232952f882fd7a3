"""Mixture of experts around two grouped matmuls: routing, permutation, and the weighted sum with what follows it.

Places within an expert are handed out by atomic counters, so the order of tokens there differs between runs; a row of
a matmul does not depend on its place, and each token sums its experts in its own order, so results have the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from herald_pipeline.model import MoeShape


@triton.jit
def _route(
    logits,
    bias,
    experts_out,
    weights_out,
    ranks_out,
    counts,
    scaling,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TAKE_GROUPS: tl.constexpr,
    K: tl.constexpr,
    KPAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    x = tl.zeros([E], tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(logits + token * E * PARTS + part * E + e)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + e)
    if GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        grouped = tl.reshape(choice, [GROUPS, SIZE])
        inner = tl.arange(0, SIZE)[None, :]
        best = tl.max(grouped, axis=1)
        value = best
        if SIZE > 1:
            first = tl.argmax(grouped, axis=1)
            value += tl.max(tl.where(inner == first[:, None], float("-inf"), grouped), axis=1)
        allowed = tl.zeros([GROUPS], tl.int32)
        g = tl.arange(0, GROUPS)
        for _ in tl.static_range(TAKE_GROUPS):
            top = tl.argmax(value, axis=0)
            allowed = tl.where(g == top, 1, allowed)
            value = tl.where(g == top, float("-inf"), value)
        grouped = tl.where(allowed[:, None] > 0, grouped, float("-inf"))
        choice = tl.reshape(grouped, [E])
    slot = tl.arange(0, KPAD)
    chosen = tl.zeros([KPAD], tl.int32)
    weights = tl.zeros([KPAD], tl.float32)
    for k in tl.static_range(K):
        top = tl.argmax(choice, axis=0).to(tl.int32)
        weight = tl.sum(tl.where(e == top, scores, 0.0), axis=0)
        chosen = tl.where(slot == k, top, chosen)
        weights = tl.where(slot == k, weight, weights)
        choice = tl.where(e == top, float("-inf"), choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    real = slot < K
    ranks = tl.atomic_add(counts + chosen, 1, mask=real)
    at = token * K + slot
    tl.store(experts_out + at, chosen, mask=real)
    tl.store(weights_out + at, weights * scaling, mask=real)
    tl.store(ranks_out + at, ranks, mask=real)


@triton.jit
def _permute(
    x, experts, ranks, counts, out, places, ends_out, size, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    held = tl.load(counts + e)
    ends = tl.cumsum(held, axis=0)
    starts = ends - held
    if token == 0:
        tl.store(ends_out + e, ends)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    row = tl.load(x + token * size + columns, mask=inside, other=0.0)
    for k in tl.static_range(K):
        expert = tl.load(experts + token * K + k)
        start = tl.sum(tl.where(e == expert, starts, 0), axis=0)
        place = (start + tl.load(ranks + token * K + k)).to(tl.int64)
        tl.store(places + token * K + k, place.to(tl.int32))
        tl.store(out + place * size + columns, row, mask=inside)


@triton.jit
def _join(
    expert_out,
    places,
    weights,
    shared,
    hidden,
    norm_weight,
    counts,
    out_hidden,
    out_normed,
    size,
    eps,
    E: tl.constexpr,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if token == 0:
        # The counters are free again for the next layer.
        tl.store(counts + tl.arange(0, E), tl.zeros([E], tl.int32))
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k)
        acc += weight * tl.load(expert_out + place * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHARED:
        acc += tl.load(shared + token * size + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(hidden + token * size + columns, mask=inside, other=0.0).to(tl.float32) + acc
    x = x.to(out_hidden.dtype.element_ty).to(tl.float32)
    tl.store(out_hidden + token * size + columns, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_normed + token * size + columns, x * scale * w, mask=inside)


def split_router(router: Tensor, dtype: torch.dtype) -> Tensor:
    """A router's fp32 weights ``[E, H]`` as a sum of matrices of ``dtype``, stacked ``[parts * E, H]``.

    Three bf16 parts carry 24 bits, so a product with bf16 inputs summed in fp32 is the fp32 product: near ties
    route as they do in fp32, at the speed of the tensor cores.
    """
    if dtype == router.dtype:
        return router
    parts, rest = [], router
    for _ in range(3):
        part = rest.to(dtype)
        parts.append(part)
        rest = rest - part.to(router.dtype)
    return torch.cat(parts)


def route_tokens(logits: Tensor, bias: Tensor | None, moe: MoeShape, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, weights and places within the expert of each token.

    Parameters
    ----------
    logits
        ``[N, parts * E]`` fp32; the parts are summed.
    counts
        ``[E]`` int32, zero before; tokens of each expert after.

    Returns
    -------
    tuple of Tensor
        Expert ids (int32), weights (fp32) and ranks (int32), ``[N, experts_per_token]`` each.
    """
    tokens, taken = logits.shape[0], moe.experts_per_token
    experts = torch.empty(tokens, taken, device=logits.device, dtype=torch.int32)
    ranks = torch.empty_like(experts)
    weights = torch.empty(tokens, taken, device=logits.device, dtype=torch.float32)
    _route[(tokens,)](
        logits,
        logits if bias is None else bias,
        experts,
        weights,
        ranks,
        counts,
        float(moe.routed_scaling),
        PARTS=logits.shape[1] // moe.num_experts,
        E=moe.num_experts,
        GROUPS=moe.num_groups,
        TAKE_GROUPS=moe.groups_per_token,
        K=taken,
        KPAD=triton.next_power_of_2(taken),
        SIGMOID=moe.gate == "sigmoid",
        HAS_BIAS=bias is not None,
        NORMALISE=moe.normalise_weights,
        num_warps=1 if moe.num_experts <= 256 else 4,
    )
    return experts, weights, ranks


def permute_tokens(x: Tensor, experts: Tensor, ranks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ``x [N, H]`` sorted by expert ``[N * k, H]``; place of each ``[N, k]``; ends of experts ``[E]``."""
    (tokens, size), taken = x.shape, experts.shape[1]
    out = x.new_empty(tokens * taken, size)
    places = torch.empty_like(experts)
    ends = torch.empty_like(counts)
    _permute[(tokens,)](
        x,
        experts,
        ranks,
        counts,
        out,
        places,
        ends,
        size,
        E=counts.shape[0],
        K=taken,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
    )
    return out, places, ends


def join_experts(
    expert_out: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Residual plus weighted experts plus shared experts, and the norm that follows: ``[N, H]`` each.

    Leaves ``counts`` at zero for the next layer.
    """
    tokens, size = hidden.shape
    joined, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _join[(tokens,)](
        expert_out,
        places,
        weights,
        hidden if shared is None else shared,
        hidden,
        norm_weight,
        counts,
        joined,
        normed,
        size,
        eps,
        E=counts.shape[0],
        K=places.shape[1],
        HAS_SHARED=shared is not None,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return joined, normed
