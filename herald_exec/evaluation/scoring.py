"""Importance of prefix entries for the queries of a selection pass, and what the pass's attention gives."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.evaluation.rules import REFINED, Rule
from herald_exec.pools import KV
from herald_exec.prefill import top_positions


@dataclass(frozen=True, slots=True)
class Scored:
    """``picked [R, kv, k]`` ascending positions (``None`` where nothing is selected), ``output [R, x, heads, d]``."""

    picked: Tensor | None
    output: Tensor


def spread(importance: Tensor, rule: Rule) -> Tensor:
    """Mean, then maximum, over the neighbours that exist; ``[R, kv, S]``."""
    if rule.smoothing > 1:
        half = rule.smoothing // 2
        importance = functional.avg_pool1d(importance, rule.smoothing, 1, half, count_include_pad=False)
    if rule.pooling > 1:
        importance = functional.max_pool1d(importance, rule.pooling, 1, rule.pooling // 2)
    return importance


def rounded_to_int8(keys: Tensor) -> Tensor:
    """Keys as 8-bit integers with one scale a row give them back; fp32."""
    wide = keys.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-20) / 127
    rounded: Tensor = (wide / scale).round() * scale
    return rounded


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """``[R, x, heads, d]`` -> scaled ``[R, kv, x * G, d]`` in fp32."""
    rows, x, heads, dim = q.shape
    folded = q.view(rows, x, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scaled: Tensor = folded.float() * dim**-0.5
    return scaled


def select(q: Tensor, prefix: KV, extra: KV | None, own: KV, rule: Rule, count: int) -> Scored:
    """Attention of a pass over prefix, block n (``extra``) and the queries' own keys, and the ``count`` best entries.

    Several queries see one another, as in the executor's pass. ``count`` 0 attends and selects nothing.

    Parameters
    ----------
    q
        ``[R, x, heads, d]``.
    prefix, extra, own
        ``[R, kv, S or B or x, d]``.
    """
    rows, x, heads, dim = q.shape
    kv_heads, length = prefix.keys.shape[1:3]
    folded = _fold(q, kv_heads)
    exact = folded @ prefix.keys.float().mT
    scores = folded @ rounded_to_int8(prefix.keys).mT if rule.int8_keys and count else exact
    behind = own if extra is None else KV(*(torch.cat(pair, dim=2) for pair in zip(extra, own, strict=True)))
    rest = folded @ behind.keys.float().mT
    weights = torch.cat([scores, rest], dim=-1).softmax(dim=-1)
    picked = None
    if count:
        importance = spread(weights[..., :length].sum(dim=2), rule)
        if rule.int8_keys:
            importance = _rescored(importance, exact, scores, rest, rule, count)
            weights = torch.cat([exact, rest], dim=-1).softmax(dim=-1)
        picked = top_positions(importance, count)
        if rule.values_late:
            unread = torch.ones_like(importance, dtype=torch.bool).scatter_(-1, picked, value=False)
            weights[..., :length].masked_fill_(unread[:, :, None], 0.0)
            weights = weights / weights.sum(dim=-1, keepdim=True)
    values = torch.cat([prefix.values, behind.values], dim=2)
    out = (weights.to(values.dtype) @ values).view(rows, kv_heads, x, heads // kv_heads, dim)
    return Scored(picked, out.transpose(1, 2).reshape(rows, x, heads, dim))


def _rescored(importance: Tensor, exact: Tensor, scores: Tensor, rest: Tensor, rule: Rule, count: int) -> Tensor:
    """Exact importance of the best candidates by 8-bit keys, minus infinity elsewhere."""
    length = importance.shape[-1]
    candidates = importance.topk(min(REFINED * count, length), dim=-1).indices
    chosen = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, candidates, value=True)
    mixed = torch.where(chosen[:, :, None], exact, scores)
    found = spread(torch.cat([mixed, rest], dim=-1).softmax(dim=-1)[..., :length].sum(dim=2), rule)
    return found.masked_fill(~chosen, float("-inf"))
