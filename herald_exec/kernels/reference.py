"""The definition of selection in float64 numpy: slow, obvious, and what every tier is compared with."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .elements import from_float32, to_float32
from .int8_keys import Int8Keys
from .options import Draft, Selection, SelectOptions, Store

Float64 = npt.NDArray[np.float64]
#: Two 8-bit importances this close (relative) may rank either way: fp32 sums in another order.
CANDIDATE_TIE = 1e-4
#: One in so many of the positions above the border, the heaviest, is scored again with 8-bit keys.
HEAVY_SHARE = 8
#: Rows and queries whose largest magnitude is below are zeros in 8 and 16 bits.
ROUNDS_TO_ZERO = 1e-30


@dataclass(frozen=True)
class Expected(Selection):
    """A selection by the definition.

    Attributes
    ----------
    undecided
        Positions, ``[rows, kv_heads, longest]``, that may be scored again or not with 8-bit keys: their 8-bit
        importance ties with that of the last candidate, or with either end of those that are selected without being
        scored again. A kernel may give them exact or 8-bit importance, and only them.
    """

    undecided: npt.NDArray[np.bool_] | None = None


def _rows(store: Store, layer: int, slot: int, length: int) -> tuple[Float64, Float64]:
    k, v = store.read(layer, slot, 0, length)
    return to_float32(k, store.dtype).astype(np.float64), to_float32(v, store.dtype).astype(np.float64)


def smooth(importance: Float64, width: int) -> Float64:
    """Mean over the positions within ``width // 2`` that exist."""
    half = width // 2
    length = importance.shape[0]
    return np.array([importance[max(0, i - half) : i + half + 1].mean() for i in range(length)])


def topk(values: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """Ascending positions of the k largest; equal values keep the lower position, NaN ranks last."""
    ranked = np.where(np.isnan(values), -np.inf, values)
    order = np.lexsort((np.arange(values.shape[0]), -ranked, np.isnan(values)))
    return np.sort(order[: min(k, values.shape[0])])


def round_to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values rounded to bf16, as fp32."""
    return to_float32(from_float32(values, "bf16"), "bf16")


def _whole(values: npt.NDArray[np.float32], steps: np.float32, most: npt.NDArray[np.float32]) -> Float64:
    """Whole numbers of up to ``steps`` for the largest magnitude; the division is in fp32, as in the kernels."""
    whole: Float64 = np.rint(values * (steps / np.maximum(most, np.float32(ROUNDS_TO_ZERO)))).astype(np.float64)
    return np.where(most < ROUNDS_TO_ZERO, 0.0, whole)


def quantised(k: Float64) -> Float64:
    """Rows of K as 8-bit keys hold them: their own scale times whole numbers of -127 .. 127.

    The division is defined in fp32: elements half-way between two numbers are common in bf16.
    """
    single = k.astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.abs(single).max(-1, keepdims=True)
        whole = _whole(single, np.float32(127), most)
        scale = (most / np.float32(127)).astype(np.float64)
        found: Float64 = whole * scale + scale * 0
    return found


def rounded_queries(scaled: npt.NDArray[np.float32]) -> Float64:
    """Scaled queries as 8-bit keys meet them: 16-bit numbers times the largest magnitude over 127 x 256 + 127."""
    steps = np.float32(127 * 256 + 127)
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.abs(scaled).max(-1, keepdims=True)
        found: Float64 = _whole(scaled, steps, most) * (most / steps).astype(np.float64)
    return found


Probability = tuple[int, int, Float64, Float64]


def _score_again(
    importance: Float64, rows: list[Probability], scores: list[Float64], budget: int, options: SelectOptions
) -> tuple[list[Probability], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """8-bit probabilities with those at the border replaced; ``importance`` is replaced there in place.

    Also returns what is selected, and which positions tie with the last of the candidates, of those that are selected
    as they are, or of the heaviest. ``scores`` hold a
    row's exact and 8-bit scores in turn.
    """
    length = len(importance)
    candidates = topk(importance, min(length, int(np.ceil(budget * options.candidates))))
    num_sure = 0 if options.rescore_all else int(min(budget, length) / options.candidates)
    sure = candidates[topk(importance[candidates], num_sure)]
    heavy = sure[topk(importance[sure], -(-len(sure) // HEAVY_SHARE))]
    tied = np.zeros(length, bool)
    for last in (candidates, sure, heavy):
        if 0 < len(last) < length:
            tied |= np.abs(importance - importance[last].min()) <= CANDIDATE_TIE * importance[last].min()
    sure = np.setdiff1d(sure, heavy)
    chosen = np.setdiff1d(candidates, sure)
    importance[chosen] = 0
    again = []
    for (i, head, p, values), (rounded, exact) in zip(rows, zip(scores[1::2], scores[::2], strict=True), strict=True):
        new = p.copy()
        new[chosen] = p[chosen] * np.exp(exact[chosen] - rounded[chosen])
        new /= new.sum()
        importance[chosen] += new[chosen]
        again.append((i, head, new, values))
    best = chosen[topk(importance[chosen], budget - len(sure))]
    return again, np.sort(np.concatenate([sure, best])), tied


def select(
    store: Store,
    layer: int,
    slots: Any,
    lengths: Any,
    queries: Any,
    budget_tokens: Any,
    *,
    draft: Draft | None = None,
    extra_kv: tuple[Any, Any] | None = None,
    keys8: Int8Keys | None = None,
    options: SelectOptions | None = None,
    bf16_queries: bool = False,
    output_of: Selection | None = None,
) -> Expected:
    """What :func:`herald_exec.kernels.select` computes, in float64; importance is always kept.

    ``keys8`` selects by 8-bit keys as :mod:`.int8_keys` describes. ``bf16_queries`` rounds the scaled queries once to
    bf16, as the matrix-tile tier must: its exact definition. ``output_of`` names the positions whose V make a key-only
    output: those of a selection that decided a near-tie the other way, whose output is then still defined.
    """
    options = options or SelectOptions()
    q = np.asarray(queries.float().numpy() if hasattr(queries, "float") else queries, np.float32)
    rows, x, num_heads, head_dim = q.shape
    scale = np.float32(math.log2(math.e) / np.sqrt(head_dim))
    scaled = q * scale
    if bf16_queries:
        scaled = round_to_bf16(scaled)
    base2 = scaled.astype(np.float64) * np.log(2.0)  # back to natural exponentials
    group = num_heads // store.num_kv_heads
    lengths = np.asarray(lengths)
    budget = np.broadcast_to(np.asarray(budget_tokens), (rows,))
    max_k = int(np.minimum(budget, lengths).max(initial=0))
    output = np.zeros(q.shape)
    indices = np.full((rows, store.num_kv_heads, max_k), -1, np.int32)
    counts = np.zeros((rows, store.num_kv_heads), np.int32)
    status = np.zeros((rows, store.num_kv_heads), np.uint8)
    kept = np.zeros((rows, store.num_kv_heads, int(lengths.max(initial=0))))
    undecided = np.zeros(kept.shape, bool)
    for row in range(rows):
        length = int(lengths[row])
        k, v = _rows(store, layer, int(slots[row]), length)
        factors = np.ones((store.num_kv_heads, head_dim), np.float32)
        if keys8 and length:
            factors = keys8.channels(layer, int(slots[row]))
        rounded = quantised(k / factors) if keys8 else k
        seen_k, seen_v = k, v
        if draft is not None:
            at = layer if draft.layer is None else draft.layer
            draft_k, draft_v = _rows(draft.store, at, int(draft.slots[row]), int(draft.lengths[row]))
            seen_k, seen_v = np.concatenate([k, draft_k]), np.concatenate([v, draft_v])
        for head in range(store.num_kv_heads):
            importance = np.zeros(length)
            probabilities = []
            exact_scores: list[Float64] = []
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                for i in range(x):
                    keys, values = seen_k[:, head], seen_v[:, head]
                    if extra_kv is not None:
                        own = [np.asarray(part[row, i, head], np.float64)[None] for part in extra_kv]
                        keys, values = np.concatenate([keys, own[0]]), np.concatenate([values, own[1]])
                    if not len(keys):
                        continue
                    for g in range(group):
                        scores = keys @ base2[row, i, head * group + g]
                        exact_scores.append(scores[:length])
                        if keys8:
                            query = rounded_queries(scaled[row, i, head * group + g] * factors[head]) * np.log(2.0)
                            scores = np.concatenate([rounded[:, head] @ query, scores[length:]])
                            exact_scores.append(scores[:length])
                        p = np.exp(scores - scores.max())
                        p /= p.sum()
                        importance += p[:length]
                        probabilities.append((i, head * group + g, p, values))
            if options.smoothing > 1:
                importance = smooth(importance, options.smoothing)
            if keys8:
                probabilities, chosen, undecided[row, head, :length] = _score_again(
                    importance, probabilities, exact_scores, int(budget[row]), options
                )
            else:
                chosen = topk(importance, int(budget[row]))
            of_output = chosen if output_of is None else output_of.indices[row, head, : output_of.counts[row, head]]
            for i, query_head, p, values in probabilities:
                if options.key_only or keys8:
                    seen = np.concatenate([of_output, np.arange(length, len(p))])
                    weights, values = p[seen], values[seen]
                    total = weights.sum()
                    output[row, i, query_head] = weights @ values / total if len(seen) else 0.0
                else:
                    with np.errstate(invalid="ignore"):
                        output[row, i, query_head] = p @ values
            indices[row, head, : len(chosen)] = chosen
            counts[row, head] = len(chosen)
            kept[row, head, :length] = importance
            mine = output[row, :, head * group : (head + 1) * group]
            finite = [bool(np.isfinite(p).all()) for _i, _head, p, _values in probabilities]
            status[row, head] = not (np.isfinite(mine).all() and all(finite))
    return Expected(output, indices, counts, status, kept, undecided=undecided)
