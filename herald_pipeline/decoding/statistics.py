"""What a decoding run is judged by: forwards, commits, positions computed and reused, late and premature rounds.

A :class:`RoundRecord` is taken each round; :func:`summarise` turns a run's records into one flat, JSON-ready mapping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from herald_pipeline.decoding.arrays import Array, count, first_true, positions
from herald_pipeline.decoding.caches import ForwardPlan
from herald_pipeline.decoding.schedulers import BlockState

BEFORE_EOS = (
    *("nfe", "tokens_per_forward", "mean_active_length", "refreshes", "forwarded_positions"),
    *("active_positions", "window_positions", "refresh_positions", "reused_positions"),
)
"""Figures that :func:`summarise` gives a second time for the rounds before an answer's EOS."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of a batch; every field is ``[rows]``.

    ``live``: the row took part. ``s``, ``e``, ``U``: the block in which the round committed, and U before it.
    ``first_mask``: leftmost mask before the commits. ``candidates``: masks of the block, where the LM head runs.
    ``committed``; ``active``, ``window``, ``refresh`` (their sum is
    what was forwarded) and ``reused``: positions. ``refreshed``: the forward computed everything.
    ``late_at``, ``premature_at``: leftmost position that was late or premature, -1 where none was; None if not
    diagnosed.
    """

    live: Array
    s: Array
    e: Array
    U: Array
    first_mask: Array
    candidates: Array
    committed: Array
    active: Array
    window: Array
    refresh: Array
    reused: Array
    refreshed: Array
    late_at: Array | None = None
    premature_at: Array | None = None


def record_round(
    plan: ForwardPlan,
    opened: BlockState,
    masked: Array,
    accepted: Array,
    *,
    confidence: Array | None = None,
    threshold: float = 0.9,
) -> RoundRecord:
    """Record of a round, before :meth:`Scheduler.advance`.

    ``confidence [rows, L]`` (of *all* masked positions) turns on the diagnosis of the DSB article's section 8: a round
    is *late* if some mask outside the block has confidence >= ``threshold`` and was held back, *premature* if some
    commit has less.
    """
    active, window, refresh = plan.split(opened.active(masked))
    late = premature = None
    if confidence is not None:
        outside = masked & plan.valid & ~opened.active(masked)
        late = first_true(outside & (confidence >= threshold), -1)
        premature = first_true(accepted & (confidence < threshold), -1)
    return RoundRecord(
        live=~opened.done,
        s=opened.s,
        e=opened.e,
        U=opened.U,
        first_mask=first_true(masked & plan.valid, opened.end),
        candidates=count(masked & plan.valid & opened.active(masked)),
        committed=count(accepted),
        active=count(active),
        window=count(window),
        refresh=count(refresh),
        reused=count(plan.reused),
        refreshed=plan.refresh,
        late_at=late,
        premature_at=premature,
    )


def first_eos(tokens: Array, state: BlockState, eos_token_ids: Sequence[int]) -> Array:
    """``[rows]``: position of the first end-of-sequence token of the response, its end where there is none."""
    found = tokens != tokens
    for token_id in eos_token_ids:
        found = found | (tokens == token_id)
    place = positions(tokens)
    inside = (place >= state.prompt[:, None]) & (place < state.end[:, None])
    return first_true(found & inside, state.end)


def _host(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def _stack(records: Sequence[RoundRecord], name: str) -> np.ndarray[Any, Any]:
    return np.stack([_host(getattr(record, name)) for record in records])


def _ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def summarise(
    records: Sequence[RoundRecord], *, eos_position: Array | None = None, prompt: Array | None = None
) -> dict[str, Any]:
    """A run in numbers, over all its rows, twice: all rounds, and only those before the answer was complete.

    A round is *before the EOS* if the answer's first EOS, or a position left of it, was still masked: what a run that
    stops at the EOS would have run. Without an EOS that is every round.

    Parameters
    ----------
    records
        One a round, in order; at least one.
    eos_position, prompt
        ``[rows]``: where each answer's first EOS is (its end without one), and where the response starts. Without
        them ``delivered_tokens`` and everything ``_before_eos`` is None.

    Returns
    -------
    dict
        ``nfe``: forwards summed over rows. ``forwards``: forwards of the batch. ``tokens``, ``tokens_per_forward``,
        ``mean_active_length``, ``mean_commits_per_round``, ``commits_per_round`` (a list a row), ``refreshes``,
        ``forwarded_positions`` = ``active_positions`` + ``window_positions`` + ``refresh_positions``,
        ``reused_positions``; ``late_ratio``, ``premature_ratio`` (rounds of all rounds; None if not diagnosed);
        ``delivered_tokens`` (up to and with the EOS), ``delivered_tokens_per_forward``. Each name of
        :data:`BEFORE_EOS` once more with ``_before_eos``: ``tokens_per_forward_before_eos`` is delivered tokens a round
        before the EOS, the two ratios before the EOS also leave out what happened at or right of it.
    """
    live, committed = _stack(records, "live"), _stack(records, "committed")
    everything = _counts(records, live)
    delivered, before = None, dict.fromkeys(f"{name}_before_eos" for name in BEFORE_EOS)
    if eos_position is not None and prompt is not None:
        eos = _host(eos_position)
        end = np.maximum.reduce(_stack(records, "e"))
        delivered = int((np.minimum(eos + 1, end) - _host(prompt)).sum())
        counted = _counts(records, live & (_stack(records, "first_mask") <= eos))
        counted["tokens_per_forward"] = _ratio(delivered, counted["nfe"])
        before = {f"{name}_before_eos": counted[name] for name in BEFORE_EOS}
    nfe = everything["nfe"]
    return {
        **everything,
        "forwards": len(records),
        "mean_commits_per_round": everything["tokens_per_forward"],
        "commits_per_round": [committed[live[:, row], row].tolist() for row in range(live.shape[1])],
        "delivered_tokens": delivered,
        "delivered_tokens_per_forward": None if delivered is None else _ratio(delivered, nfe),
        **before,
        **_diagnosis(records, live, eos_position),
    }


def _counts(records: Sequence[RoundRecord], counted: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Sums and means over the rounds and rows of ``counted [rounds, rows]``."""
    sums = {
        name: int(_stack(records, name)[counted].sum())
        for name in ("committed", "active", "window", "refresh", "reused", "refreshed")
    }
    nfe = int(counted.sum())
    length = (_stack(records, "e") - _stack(records, "s"))[counted]
    return {
        "nfe": nfe,
        "tokens": sums["committed"],
        "tokens_per_forward": _ratio(sums["committed"], nfe),
        "mean_active_length": float(length.mean()) if nfe else None,
        "refreshes": sums["refreshed"],
        "forwarded_positions": sums["active"] + sums["window"] + sums["refresh"],
        **{f"{name}_positions": sums[name] for name in ("active", "window", "refresh", "reused")},
    }


def _diagnosis(
    records: Sequence[RoundRecord], live: np.ndarray[Any, Any], eos_position: Array | None
) -> dict[str, float | None]:
    kinds = ("late", "premature")
    if any(record.late_at is None for record in records):
        return {f"{kind}_ratio{part}": None for kind in kinds for part in ("", "_before_eos")}
    result: dict[str, float | None] = {}
    for kind in kinds:
        place = _stack(records, f"{kind}_at")
        result[f"{kind}_ratio"] = _ratio(((place >= 0) & live).sum(), live.sum())
        result[f"{kind}_ratio_before_eos"] = None
        if eos_position is not None:
            eos = _host(eos_position)[None, :]
            counted = live & (_stack(records, "first_mask") < eos)
            happened = counted & (place >= 0) & (place < eos)
            result[f"{kind}_ratio_before_eos"] = _ratio(happened.sum(), counted.sum())
    return result
