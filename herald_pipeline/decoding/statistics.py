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
    """A run in numbers, over all its rows.

    Parameters
    ----------
    records
        One a round, in order; at least one.
    eos_position, prompt
        ``[rows]``: where each answer's first EOS is (its end without one), and where the response starts. With them,
        delivered tokens and the ratios before the EOS are given.

    Returns
    -------
    dict
        ``nfe``: forwards summed over rows. ``forwards``: forwards of the batch. ``tokens``, ``tokens_per_forward``,
        ``mean_active_length``, ``mean_commits_per_round``, ``commits_per_round`` (a list a row), ``refreshes``,
        ``forwarded_positions`` = ``active_positions`` + ``window_positions`` + ``refresh_positions``,
        ``reused_positions``; ``late_ratio``, ``premature_ratio`` (rounds of all rounds; None if not diagnosed) and
        ``late_ratio_before_eos``, ``premature_ratio_before_eos``; ``delivered_tokens``,
        ``delivered_tokens_per_forward`` (up to and with the EOS; None if unknown).
    """
    live = _stack(records, "live")
    committed = _stack(records, "committed")
    counts = {name: int(_stack(records, name).sum()) for name in ("active", "window", "refresh", "reused")}
    nfe, tokens = int(live.sum()), int(committed.sum())
    length = (_stack(records, "e") - _stack(records, "s"))[live]
    delivered = None
    if eos_position is not None and prompt is not None:
        end = np.maximum.reduce(_stack(records, "e"))
        delivered = int((np.minimum(_host(eos_position) + 1, end) - _host(prompt)).sum())
    result: dict[str, Any] = {
        "nfe": nfe,
        "forwards": len(records),
        "tokens": tokens,
        "tokens_per_forward": _ratio(tokens, nfe),
        "delivered_tokens": delivered,
        "delivered_tokens_per_forward": None if delivered is None else _ratio(delivered, nfe),
        "mean_active_length": float(length.mean()),
        "mean_commits_per_round": _ratio(tokens, nfe),
        "commits_per_round": [committed[live[:, row], row].tolist() for row in range(live.shape[1])],
        "refreshes": int(_stack(records, "refreshed").sum()),
        "forwarded_positions": counts["active"] + counts["window"] + counts["refresh"],
        **{f"{name}_positions": number for name, number in counts.items()},
    }
    return {**result, **_diagnosis(records, live, eos_position)}


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
