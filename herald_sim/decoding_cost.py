"""What cache rules and schedules of a bidirectional model cost on a machine, replayed from recorded commits.

A recording says which positions each round committed. Replaying it through a scheduler and a cache rule (the
executor's own, on numpy) gives the positions that each round computes and reuses; the profile prices them. Commits stay
as recorded: a cache that makes the model less sure takes more rounds in reality, and only a real run shows how many.

    herald-exec bench-decoding --model DIR --prompts FILE --json > bench.json     # records
    simulate_decoding(model, profile, read_recordings("bench.json"), blocks, cached)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from herald_pipeline import hardware_io
from herald_pipeline import pipeline as pipelines
from herald_pipeline.decoding.caches import CacheRule
from herald_pipeline.decoding.schedulers import Scheduler
from herald_pipeline.decoding.statistics import RoundRecord, record_round, summarise
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Profile
from herald_pipeline.model import ModelShape
from herald_pipeline.stages import LaunchShape, Repeat, Stage, Work
from herald_pipeline.units import NS_PER_S
from herald_pipeline.work import Forward
from herald_sim.cost import CostModel, needs


@dataclass(frozen=True, slots=True)
class Recording:
    """Commits of one request: ``commits[round]`` are positions counted from the response's start.

    ``decoder``, ``scheduler`` and ``cache`` say what it was recorded under, where that is known.
    """

    prompt_tokens: int
    commits: tuple[tuple[int, ...], ...]
    decoder: str = ""
    scheduler: str = ""
    cache: str = ""

    @property
    def response_tokens(self) -> int:
        """All positions of the response; every one is committed once."""
        return sum(len(positions) for positions in self.commits)


def _recording(row: Any, where: str) -> Recording:
    if not isinstance(row, dict) or not {"prompt_tokens", "commits"} <= set(row):
        message = f'{where} must hold "prompt_tokens" and "commits" (lists of positions, one a round)'
        raise ConfigError(message)
    try:
        commits = tuple(tuple(int(p) for p in positions) for positions in row["commits"])
        prompt = int(row["prompt_tokens"])
    except (TypeError, ValueError):
        message = f"{where}: prompt_tokens must be a whole number, and commits lists of positions, one list a round"
        raise ConfigError(message) from None
    seen = sorted(p for positions in commits for p in positions)
    if not seen or seen != list(range(len(seen))):
        message = f"{where}: commits must name every position of the response from 0 on exactly once"
        raise ConfigError(message)
    if prompt < 0:
        message = f"{where}: prompt_tokens must be >= 0, got {prompt}"
        raise ConfigError(message)
    names = {name: str(row.get(name, "")) for name in ("decoder", "scheduler", "cache")}
    return Recording(prompt, commits, **names)


def read_recordings(path: str | Path, **conditions: str) -> list[Recording]:
    """Recordings from the JSON of ``herald-exec bench-decoding`` (its ``rows``), or from a plain list of such rows.

    ``conditions`` keep those recorded under a ``decoder``, ``scheduler`` or ``cache``.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"commits file {path}: {error}"
        raise ConfigError(message) from None
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        message = f'{path} must hold a list of rows, or an object with "rows"'
        raise ConfigError(message)
    found = [_recording(row, f"{path}, row {index}") for index, row in enumerate(rows)]
    kept = [r for r in found if all(getattr(r, name) == wanted for name, wanted in conditions.items())]
    if not kept:
        choices = sorted({(r.decoder, r.scheduler, r.cache) for r in found})
        listed = "; ".join(" + ".join(choice) for choice in choices) or "nothing"
        message = f"{path} holds no recording under {conditions}; it holds {listed}"
        raise ConfigError(message)
    return kept


def replay(
    recordings: Sequence[Recording], blocks: Scheduler, cached: CacheRule, *, shifted_logits: bool = False
) -> list[RoundRecord]:
    """Rounds of all recordings in one batch, through ``blocks`` and ``cached``.

    Raises
    ------
    ConfigError
        A recorded commit lies outside the block of the scheduler: it was recorded under another one.
    """
    if blocks.needs_delimiters:
        message = "a recording does not say where delimiters were, so scheduler 'adablock' cannot be replayed"
        raise ConfigError(message)
    prompt = np.asarray([r.prompt_tokens for r in recordings])
    response = np.asarray([r.response_tokens for r in recordings])
    place = np.arange(int((prompt + response).max()))[None, :]
    masked = (place >= prompt[:, None]) & (place < (prompt + response)[:, None])
    state = blocks.start(prompt, response)
    cache = cached.start(state, masked)
    records = []
    for number in range(max(len(r.commits) for r in recordings)):
        accepted = np.zeros_like(masked)
        for row, recording in enumerate(recordings):
            positions = recording.commits[number] if number < len(recording.commits) else ()
            accepted[row, [recording.prompt_tokens + p for p in positions]] = True
        _check_inside(accepted & ~state.active(masked), number, recordings, state)
        plan = cached.plan(cache, state, masked, upcoming=accepted, predecessor=shifted_logits)
        records.append(record_round(plan, state, masked, accepted))
        after = blocks.advance(state, masked, accepted)
        cache = cached.observe(cache, plan, state, after, accepted, blocks)
        state, masked = after, masked & ~accepted
    return records


def _check_inside(outside: Any, number: int, recordings: Sequence[Recording], state: Any) -> None:
    if not outside.any():
        return
    row, position = (int(index) for index in np.argwhere(outside)[0])
    under = recordings[row].scheduler or "another scheduler"
    message = (
        f"round {number} of recording {row} commits position {position}, outside the block "
        f"[{int(state.s[row])}, {int(state.e[row])}): it was recorded under {under!r} with other settings; "
        "record again with the scheduler to be simulated"
    )
    raise ConfigError(message)


@dataclass
class DecodingCost:
    """Prices forwards over some positions of a sequence against keys of all of it."""

    model: ModelShape
    profile: Profile

    def __post_init__(self) -> None:
        pipeline = pipelines.build(self.model, "dense")
        required = needs(pipeline)
        if self.profile.missing(required):
            self.profile.check_complete(required, hardware_io.complete_names(required))
        self._forward = Forward(self.model, pipeline.settings)
        self._costs = CostModel(pipeline, self.profile)

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Curves of the profile that were read outside what was measured."""
        return tuple(sorted(self._costs.extrapolated))

    def forward_ns(self, tokens: int, reused: int, pairs: int, read: int) -> int:
        """Time of one forward.

        Parameters
        ----------
        tokens
            Positions computed, over all rows.
        reused
            Positions whose KV is read from the cache, over all rows.
        pairs
            Query-key pairs: over rows, positions computed x positions of the sequence.
        read
            Positions that the LM head runs on.
        """
        if tokens == 0:
            return 0
        forward, model = self._forward, self.model
        borders = sorted({0, model.num_dense_layers, model.num_layers})
        work: Work = tuple(
            Repeat(
                stop - start,
                (
                    forward.qkv(tokens),
                    forward.attention(tokens, reused, pairs),
                    forward.output(tokens),
                    *forward.ffn(tokens, start),
                ),
            )
            for start, stop in pairwise(borders)
        )
        head = forward.head(read)
        work = (*work, Repeat(1, head)) if head else work
        stage = Stage("round", "denoise", "main", "gpu", lambda _shape, _layer: work)
        shape = LaunchShape(1, tokens, read, reused, 0, 0, pairs, 0)
        return self._costs.stage_cost(stage, shape, None).total_ns

    def round_ns(self, record: RoundRecord) -> int:
        """Time of one recorded round of a batch."""
        forwarded = record.active + record.window + record.refresh
        length = forwarded + record.reused
        return self.forward_ns(
            int(forwarded.sum()),
            int(record.reused.sum()),
            int((forwarded * length).sum()),
            int(record.candidates.sum()),
        )


def simulate_decoding(
    model: ModelShape,
    profile: Profile,
    recordings: Sequence[Recording],
    blocks: Scheduler,
    cached: CacheRule,
) -> dict[str, Any]:
    """Predicted cost of recorded commits under a schedule and a cache rule.

    Returns
    -------
    dict
        The statistics of :func:`herald_pipeline.decoding.statistics.summarise`, ``decode_s``, ``throughput_tok_s``
        (committed tokens: recordings know no end of text), ``full_forward_ms`` and ``short_step_ms`` (means; None where
        there is none), ``extrapolated``, ``provenance``.
    """
    records = replay(recordings, blocks, cached, shifted_logits=model.shifted_logits)
    cost = DecodingCost(model, profile)
    times = np.asarray([cost.round_ns(record) for record in records])
    full = np.asarray([bool((record.refreshed | ~record.live).all()) for record in records])

    def mean_ms(which: Any) -> float | None:
        return float(times[which].mean() / 1e6) if which.any() else None

    statistics = summarise(records)
    total_s = float(times.sum() / NS_PER_S)
    return {
        "model": model.name,
        "hardware": profile.name,
        "batch": len(recordings),
        **statistics,
        "decode_s": total_s,
        "throughput_tok_s": statistics["tokens"] / total_s,
        "full_forward_ms": mean_ms(full),
        "short_step_ms": mean_ms(~full),
        "extrapolated": list(cost.extrapolated),
        "provenance": "simulated",
    }
