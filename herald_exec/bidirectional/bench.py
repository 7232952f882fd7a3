"""Decoder x scheduler x cache over a set of prompts, one tidy row for each combination and prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from herald_exec.bidirectional.batch import make_batch
from herald_exec.bidirectional.loop import Decoded, decode
from herald_exec.bidirectional.prompts import Item, is_correct
from herald_exec.checkpoints.tokenizer import TextTokenizer
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.policy import DecodingPolicy, combination_problem, model_policy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.decoding.statistics import BEFORE_EOS, summarise_each
from herald_pipeline.decoding.views import VARIES, VIEWS, Combination, views_of

REFERENCE = Combination("top1", "fixed", "none")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all combinations of a bench share.

    ``block`` is B and S_init; ``s_max``, ``prefix_window`` and ``threshold`` as in
    :func:`herald_pipeline.decoding.policy.model_policy`; ``stop_at_eos`` and ``delimiters`` as in
    :class:`herald_exec.bidirectional.loop.Loop`.
    """

    response_length: int = 256
    batch_size: int = 1
    block: int = 32
    steps: int = 32
    threshold: float | None = None
    s_max: int | None = None
    prefix_window: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    match: str = "exact"
    check: bool = False
    diagnose: bool = False
    stop_at_eos: bool = False
    delimiters: tuple[int, ...] | None = None

    @property
    def counted(self) -> str:
        """What rounds and tokens the figures count, in words."""
        if self.stop_at_eos:
            return "rounds and tokens until an answer's EOS is final; what is right of it is never decoded"
        return "the whole response, what follows an EOS included; names with _before_eos count until it is final"

    def policy(self, combination: Combination, *, shifted_logits: bool) -> DecodingPolicy:
        """The combination's policy; settings that a choice does not have are left out of it."""
        decoder, scheduler, cache = combination
        return model_policy(
            decoder,
            scheduler,
            cache,
            shifted_logits=shifted_logits,
            threshold=self.threshold if decoder.startswith("confidence") else None,
            block=self.block,
            s_max=self.s_max if scheduler == "dsb-greedy" else None,
            prefix_window=self.prefix_window if cache.startswith("dsb") else None,
            steps=self.steps,
        )


def row_seconds(decoded: Decoded) -> np.ndarray[Any, Any]:
    """Each row's share of the wall time: a round's seconds are divided among the rows that took part."""
    live = np.stack([record.live for record in decoded.records])
    shares = np.asarray(decoded.seconds)[:, None] * live / live.sum(axis=1, keepdims=True)
    return np.asarray(shares.sum(axis=0))


def rows_statistics(decoded: Decoded) -> list[dict[str, Any]]:
    """:func:`~herald_pipeline.decoding.statistics.summarise` of each row, with its ``commits`` and block ``ends``."""
    batch, committed_in = decoded.batch, decoded.committed_in.numpy()
    live, ends = (np.stack([getattr(record, name) for record in decoded.records]) for name in ("live", "e"))
    rows = []
    for row, statistics in enumerate(
        summarise_each(decoded.records, eos_position=decoded.eos_position, prompt=batch.prompt)
    ):
        prompt, took_part = int(batch.prompt[row]), live[:, row]
        response = committed_in[row, prompt : int(batch.end[row])]
        rows.append(
            {
                **statistics,
                "commits_per_round": statistics["commits_per_round"][0],
                "commits": [np.flatnonzero(response == number).tolist() for number in np.flatnonzero(took_part)],
                "ends": (ends[took_part, row] - prompt).tolist(),
            }
        )
    return rows


def run_combination(
    model: BlockModel,
    items: Sequence[Item],
    combination: Combination,
    settings: Settings,
    *,
    tokenizer: TextTokenizer | None = None,
) -> list[dict[str, Any]]:
    """Rows of one combination, one a prompt, in order.

    ``response`` holds the delivered tokens. ``herald_sim.decoding_cost`` replays ``commits`` (the positions of each
    round) and ``ends`` (the end of the block that it committed in), both counted from the response's start, and
    ``response_tokens`` (the length asked for).
    """
    policy = settings.policy(combination, shifted_logits=model.shape.shifted_logits)
    sampler = Sampler(settings.temperature, settings.top_p, model.shape.mask_token_id)
    rows: list[dict[str, Any]] = []
    for first in range(0, len(items), settings.batch_size):
        part = items[first : first + settings.batch_size]
        seeds = [settings.seed + first + i for i in range(len(part))]
        prompts = [item.prompt for item in part]
        batch = make_batch(model.shape, prompts, settings.response_length, seeds=seeds, device=model.device)
        decoded = decode(
            model,
            batch,
            policy,
            sampler,
            check=settings.check,
            diagnose=settings.diagnose,
            threshold=settings.threshold or 0.9,
            stop_at_eos=settings.stop_at_eos,
            delimiters=settings.delimiters,
        )
        seconds, statistics = row_seconds(decoded), rows_statistics(decoded)
        for row, item in enumerate(part):
            response = decoded.response(row)
            rows.append(
                {
                    **combination._asdict(),
                    "prompt": first + row,
                    "prompt_tokens": len(item.prompt),
                    "response_tokens": settings.response_length,
                    "seconds": float(seconds[row]),
                    "correct": is_correct(item, response, tokenizer, settings.match, model.shape.eos_token_ids),
                    "response": response,
                    **statistics[row],
                }
            )
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _before_eos(rows: Sequence[dict[str, Any]], delivered: int) -> dict[str, Any]:
    """The figures before the EOS of all rows together; a row without its answer complete has at least one round."""
    names = [f"{name}_before_eos" for name in BEFORE_EOS]
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    nfe = total["nfe_before_eos"]
    length = sum(row["mean_active_length_before_eos"] * row["nfe_before_eos"] for row in rows)
    return {**total, "tokens_per_forward_before_eos": delivered / nfe, "mean_active_length_before_eos": length / nfe}


def summarise_rows(
    combination: Combination, rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One combination over all its prompts: sums of forwards and positions, ratios of sums, accuracy where known."""
    total = {
        name: sum(row[name] for row in rows)
        for name in (
            "nfe",
            "tokens",
            "delivered_tokens",
            "refreshes",
            "active_positions",
            "window_positions",
            "refresh_positions",
            "forwarded_positions",
            "reused_positions",
            "seconds",
        )
    }
    same = [row["response"] == other["response"] for row, other in zip(rows, reference, strict=True)]
    return {
        **combination._asdict(),
        "views": views_of(combination),
        "prompts": len(rows),
        **total,
        "tokens_per_forward": total["tokens"] / total["nfe"],
        "delivered_tokens_per_forward": total["delivered_tokens"] / total["nfe"],
        "seconds_per_forward": total["seconds"] / total["nfe"],
        "throughput_tok_s": total["delivered_tokens"] / total["seconds"],
        "mean_active_length": sum(row["mean_active_length"] * row["nfe"] for row in rows) / total["nfe"],
        **_before_eos(rows, total["delivered_tokens"]),
        "late_ratio": _mean(row["late_ratio"] for row in rows),
        "late_ratio_before_eos": _mean(row["late_ratio_before_eos"] for row in rows),
        "premature_ratio": _mean(row["premature_ratio"] for row in rows),
        "premature_ratio_before_eos": _mean(row["premature_ratio_before_eos"] for row in rows),
        "accuracy": _mean(None if row["correct"] is None else float(row["correct"]) for row in rows),
        "same_as_reference": _mean(float(s) for s in same),
    }


def bench(
    model: BlockModel,
    items: Sequence[Item],
    combinations: Sequence[Combination],
    settings: Settings,
    *,
    tokenizer: TextTokenizer | None = None,
) -> dict[str, Any]:
    """Run every combination that makes sense, the Top-1 reference always.

    Returns
    -------
    dict
        ``counted`` (what the figures count, in words), ``combinations`` (one row each), ``rows`` (one for each
        combination and prompt), ``skipped`` (with the reason),
        ``views``: for each group in which one axis varies, what varies and which combinations were run.
    """
    wanted = list(dict.fromkeys([REFERENCE, *combinations]))
    problems = {c: combination_problem(*c, bidirectional=True) for c in wanted}
    skipped = [{**c._asdict(), "reason": problem} for c, problem in problems.items() if problem is not None]
    wanted = [c for c in wanted if problems[c] is None]
    for combination in wanted:
        # A setting that one combination refuses is found before the others have run for an hour.
        settings.policy(combination, shifted_logits=model.shape.shifted_logits)
    runs: dict[Combination, list[dict[str, Any]]] = {}
    # Warm up on one prompt, so that first-call costs fall on nobody.
    run_combination(model, items[:1], REFERENCE, replace(settings, response_length=min(4, settings.response_length)))
    for combination in wanted:
        runs[combination] = run_combination(model, items, combination, settings, tokenizer=tokenizer)
    summaries = [summarise_rows(combination, rows, runs[REFERENCE]) for combination, rows in runs.items()]
    return {
        "stop_at_eos": settings.stop_at_eos,
        "counted": settings.counted,
        "combinations": summaries,
        "rows": [row for rows in runs.values() for row in rows],
        "skipped": skipped,
        "views": {
            name: {"varies": VARIES[name], "combinations": [list(c) for c in group if c in runs]}
            for name, group in VIEWS.items()
        },
    }
