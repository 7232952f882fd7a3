"""The few array idioms that all policies share, for numpy and torch alike.

Policies are pure functions on arrays of fixed shape: ``where``, ``cumulative_sum`` and ``argsort``, no boolean
indexing and no loop over rows, so that one text runs in the simulator, in tests and inside a captured CUDA graph.
"""

from typing import Any

from array_api_compat import array_namespace, device

Array = Any
"""``[rows, ...]`` array of any library that the array API covers; the package does not import torch."""

__all__ = [
    "Array",
    "array_namespace",
    "best_one",
    "column",
    "count",
    "device",
    "first_true",
    "positions",
    "rank_descending",
]


def column(value: Any) -> Any:
    """``value`` as a column that broadcasts over positions: ``[rows]`` to ``[rows, 1]``; a plain number stays."""
    return value[:, None] if getattr(value, "ndim", 0) == 1 else value


def positions(like: Array) -> Array:
    """``[1, L]`` of the position numbers of ``like [rows, L]``, on its device."""
    xp = array_namespace(like)
    return xp.arange(like.shape[-1], dtype=xp.int64, device=device(like))[None, :]


def count(mask: Array) -> Array:
    """``[rows]`` int64: true entries of each row of ``mask [rows, L]``."""
    xp = array_namespace(mask)
    return xp.sum(xp.astype(mask, xp.int64), axis=-1)


def first_true(mask: Array, otherwise: Any) -> Array:
    """``[rows]``: position of the leftmost true entry, ``otherwise`` in rows without one."""
    xp = array_namespace(mask)
    # argmax of equal values is the first one, in both libraries.
    index = xp.argmax(xp.astype(mask, xp.int8), axis=-1)
    return xp.where(xp.any(mask, axis=-1), index, otherwise)


def best_one(score: Array, among: Array) -> Array:
    """``[rows, L]`` bool: the candidate of highest ``score``, the leftmost of equals.

    A row without candidates has none.
    """
    xp = array_namespace(score, among)
    best = xp.argmax(xp.where(among, score, -float("inf")), axis=-1)
    return (positions(score) == best[:, None]) & among


def rank_descending(score: Array, among: Array) -> Array:
    """``[rows, L]`` int64: place of each candidate by falling ``score``, 0 the highest, equals from the left.

    Entries that are no candidates rank behind all candidates.
    """
    xp = array_namespace(score, among)
    order = xp.argsort(xp.where(among, -score, float("inf")), axis=-1, stable=True)
    return xp.astype(xp.argsort(order, axis=-1, stable=True), xp.int64)
