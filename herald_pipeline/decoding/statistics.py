"""What a decoding run is judged by: forwards, commits, positions computed and reused, late and premature rounds.

A :class:`RoundRecord` is taken each round; :func:`summarise` turns a run's records into one flat, JSON-ready mapping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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


Stacked = Mapping[str, np.ndarray[Any, Any] | None]
"""Records of a run by field, ``[rounds, rows]`` each."""


def _stacked(records: Sequence[RoundRecord]) -> Stacked:
    values = {part.name: [getattr(record, part.name) for record in records] for part in fields(RoundRecord)}
    return {
        name: None if any(value is None for value in column) else np.stack([_host(value) for value in column])
        for name, column in values.items()
    }


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
    eos, start = (None if value is None else _host(value) for value in (eos_position, prompt))
    return _summarise(_stacked(records), eos, start)


def summarise_each(records: Sequence[RoundRecord], *, eos_position: Array, prompt: Array) -> list[dict[str, Any]]:
    """:func:`summarise` of each row alone, over the rounds in which it took part."""
    found, eos, start = _stacked(records), _host(eos_position), _host(prompt)
    live = _known(found, "live")
    summaries = []
    for row in range(live.shape[1]):
        one, took_part = slice(row, row + 1), live[:, row]
        part = {name: None if values is None else values[took_part, one] for name, values in found.items()}
        summaries.append(_summarise(part, eos[one], start[one]))
    return summaries


def _known(found: Stacked, name: str) -> np.ndarray[Any, Any]:
    values = found[name]
    assert values is not None  # every field but the diagnosis is always there
    return values


def _summarise(found: Stacked, eos: np.ndarray[Any, Any] | None, prompt: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    live, committed = _known(found, "live"), _known(found, "committed")
    everything = _counts(found, live)
    delivered, before = None, dict.fromkeys(f"{name}_before_eos" for name in BEFORE_EOS)
    if eos is not None and prompt is not None:
        end = np.maximum.reduce(_known(found, "e"))
        delivered = int((np.minimum(eos + 1, end) - prompt).sum())
        counted = _counts(found, live & (_known(found, "first_mask") <= eos))
        counted["tokens_per_forward"] = _ratio(delivered, counted["nfe"])
        before = {f"{name}_before_eos": counted[name] for name in BEFORE_EOS}
    nfe = everything["nfe"]
    return {
        **everything,
        "forwards": len(live),
        "mean_commits_per_round": everything["tokens_per_forward"],
        "commits_per_round": [committed[live[:, row], row].tolist() for row in range(live.shape[1])],
        "delivered_tokens": delivered,
        "delivered_tokens_per_forward": None if delivered is None else _ratio(delivered, nfe),
        **before,
        **_diagnosis(found, live, eos),
    }


def _counts(found: Stacked, counted: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Sums and means over the rounds and rows of ``counted [rounds, rows]``."""
    sums = {
        name: int(_known(found, name)[counted].sum())
        for name in ("committed", "active", "window", "refresh", "reused", "refreshed")
    }
    nfe = int(counted.sum())
    length = (_known(found, "e") - _known(found, "s"))[counted]
    return {
        "nfe": nfe,
        "tokens": sums["committed"],
        "tokens_per_forward": _ratio(sums["committed"], nfe),
        "mean_active_length": float(length.mean()) if nfe else None,
        "refreshes": sums["refreshed"],
        "forwarded_positions": sums["active"] + sums["window"] + sums["refresh"],
        **{f"{name}_positions": sums[name] for name in ("active", "window", "refresh", "reused")},
    }


def _diagnosis(found: Stacked, live: np.ndarray[Any, Any], eos: np.ndarray[Any, Any] | None) -> dict[str, float | None]:
    result: dict[str, float | None] = {}
    for kind in ("late", "premature"):
        place = found[f"{kind}_at"]
        result[f"{kind}_ratio"] = result[f"{kind}_ratio_before_eos"] = None
        if place is None:
            continue
        result[f"{kind}_ratio"] = _ratio(((place >= 0) & live).sum(), live.sum())
        if eos is not None:
            counted = live & (_known(found, "first_mask") < eos[None, :])
            happened = counted & (place >= 0) & (place < eos[None, :])
            result[f"{kind}_ratio_before_eos"] = _ratio(happened.sum(), counted.sum())
    return result
