"""The DSB article's ladder: widen the block, then add the cache, and stop at the first significant loss of accuracy.

Rungs, from careful to bold: constant block, S_max 48, 64, 80, 96, unbounded, all without a cache; then the last good
schedule with the DSB cache. Each is compared with fixed blocks without a cache, prompt by prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from herald_exec.bidirectional.bench import Settings, run_combination, summarise_rows
from herald_exec.bidirectional.prompts import Item
from herald_exec.checkpoints.tokenizer import TextTokenizer
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.views import Combination
from herald_pipeline.errors import ConfigError, check_number, raise_problems

S_MAX_LADDER = (48, 64, 80, 96)
BASE = Combination("confidence", "fixed", "none")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: a schedule and a cache."""

    name: str
    scheduler: str
    s_max: int | None
    cache: str


def ladder(s_init: int, s_max: Sequence[int] = S_MAX_LADDER) -> list[Rung]:
    """Schedules without a cache, from the constant block to the unbounded; caps not above ``s_init`` are left out."""
    caps = sorted({cap for cap in s_max if cap > s_init})
    return [
        Rung("const", "dsb-const", None, "none"),
        *(Rung(f"s_max {cap}", "dsb-greedy", cap, "none") for cap in caps),
        Rung("greedy", "dsb-greedy", None, "none"),
    ]


def loss_probability(losses: int, gains: int) -> float:
    """Chance of at least ``losses`` among losses + gains if both were equally likely (one-sided exact McNemar test).

    ``losses``: prompts that only the reference gets right; ``gains``: prompts that only the candidate gets right.
    """
    number = losses + gains
    ways = sum(math.comb(number, k) for k in range(losses, number + 1))
    return float(ways / 2**number)


def needed_losses(alpha: float) -> int:
    """Fewest losses without a gain that are significant: below so many prompts the ladder could never stop."""
    # 2^-n must lie below alpha, not on it.
    return math.floor(math.log2(1 / alpha)) + 1


def _compare(rung: Rung, rows: list[dict[str, Any]], base: list[dict[str, Any]], alpha: float) -> dict[str, Any]:
    losses = sum(b["correct"] and not r["correct"] for r, b in zip(rows, base, strict=True))
    gains = sum(r["correct"] and not b["correct"] for r, b in zip(rows, base, strict=True))
    probability = loss_probability(losses, gains)
    combination = Combination(BASE.decoder, rung.scheduler, rung.cache)
    return {
        "rung": rung.name,
        "s_max": rung.s_max,
        **summarise_rows(combination, rows, base),
        "losses": losses,
        "gains": gains,
        "p_value": probability,
        "significant_loss": probability < alpha,
    }


def tune(
    model: BlockModel,
    items: Sequence[Item],
    settings: Settings,
    *,
    alpha: float = 0.05,
    s_max: Sequence[int] = S_MAX_LADDER,
    tokenizer: TextTokenizer | None = None,
) -> dict[str, Any]:
    """Climb the ladder on prompts with answers.

    Returns
    -------
    dict
        ``counted`` (what the figures count, in words), ``base`` and ``rungs`` (those that were run, the one that failed
        last), ``stopped_at`` (its name, or None) and
        ``recommended``: the fastest by tokens a second among the rungs without significant loss, the base included.

    Raises
    ------
    ConfigError
        A prompt lacks its answer, or there are too few prompts for any loss to be significant.
    """
    raise_problems([check_number(alpha, "alpha", above=0, maximum=0.5)])
    missing = [index for index, item in enumerate(items) if item.answer is None]
    if missing:
        message = f"tune-decoding compares accuracy, and prompt {missing[0]} has no answer; give every prompt one"
        raise ConfigError(message)
    if len(items) < needed_losses(alpha):
        message = (
            f"{len(items)} prompts cannot show a loss at alpha {alpha:g}: at least {needed_losses(alpha)} are needed, "
            "and hundreds to see small ones"
        )
        raise ConfigError(message)

    def run(rung: Rung) -> list[dict[str, Any]]:
        combination = Combination(BASE.decoder, rung.scheduler, rung.cache)
        return run_combination(model, items, combination, replace(settings, s_max=rung.s_max), tokenizer=tokenizer)

    base = run(Rung("base", BASE.scheduler, None, BASE.cache))
    rungs: list[dict[str, Any]] = []
    good: Rung | None = None
    stopped = None
    for rung in ladder(settings.block, s_max):
        rungs.append(_compare(rung, run(rung), base, alpha))
        if rungs[-1]["significant_loss"]:
            stopped = rung.name
            break
        good = rung
    if good is not None:
        cached = replace(good, name=f"{good.name} + dsb cache", cache="dsb")
        rungs.append(_compare(cached, run(cached), base, alpha))
        if rungs[-1]["significant_loss"] and stopped is None:
            stopped = cached.name
    base_row = {"rung": "base", "s_max": None, **summarise_rows(BASE, base, base), "significant_loss": False}
    kept = [base_row, *(rung for rung in rungs if not rung["significant_loss"])]
    best = max(kept, key=lambda rung: float(rung["throughput_tok_s"]))
    return {
        "alpha": alpha,
        "stop_at_eos": settings.stop_at_eos,
        "counted": settings.counted,
        "prompts": len(items),
        "smallest_significant_loss": needed_losses(alpha) / len(items),
        "base": base_row,
        "rungs": rungs,
        "stopped_at": stopped,
        "recommended": {name: best[name] for name in ("rung", "decoder", "scheduler", "s_max", "cache")},
    }
