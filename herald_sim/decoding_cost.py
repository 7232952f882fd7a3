"""What cache rules and schedules of a bidirectional model cost on a machine, replayed from recorded commits.

A recording says which positions each round committed. Replaying it through a scheduler and a cache rule (the
executor's own, on numpy) gives the positions that each round computes and reuses; the profile prices them. Commits stay
as recorded: a cache that makes the model less sure takes more rounds in reality, and only a real run shows how many.

    herald-exec bench-decoding --model DIR --prompts FILE --json > bench.json     # records
    simulate_decoding(model, profile, read_recordings("bench.json"), blocks, cached)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from herald_pipeline import hardware_io
from herald_pipeline import pipeline as pipelines
from herald_pipeline.decoding.caches import CacheRule
from herald_pipeline.decoding.policy import DecodingPolicy, model_policy
from herald_pipeline.decoding.schedulers import Scheduler
from herald_pipeline.decoding.statistics import RoundRecord, summarise
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.hardware import Profile
from herald_pipeline.model import Attention, ModelShape
from herald_pipeline.stages import LaunchShape, Repeat, Stage, Work
from herald_pipeline.units import NS_PER_S
from herald_pipeline.work import Forward
from herald_sim.cost import CostModel, needs
from herald_sim.recordings import Recording, read_recordings, replay


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


_SUMS = (
    *("nfe", "forwards", "tokens", "refreshes", "forwarded_positions", "active_positions"),
    *("window_positions", "refresh_positions", "reused_positions", "decode_s"),
)


@dataclass(frozen=True, slots=True)
class DecodingChoice:
    """Decoder, scheduler and cache rule of a run, with their parameters; None: the model's own."""

    decoder: str = "confidence"
    scheduler: str = "fixed"
    cache: str = "none"
    block: int = 32
    s_max: int | None = None
    prefix_window: int | None = None

    def policy(self, model: ModelShape) -> DecodingPolicy:
        """The policy, refused where it does not go with the model."""
        return model_policy(
            self.decoder,
            self.scheduler,
            self.cache,
            shifted_logits=model.shifted_logits,
            bidirectional=model.attention is Attention.BIDIRECTIONAL,
            block=self.block,
            s_max=self.s_max,
            prefix_window=self.prefix_window,
        )


def run_decoding(
    model: ModelShape,
    profile: Profile,
    choice: DecodingChoice,
    commits: Path | None,
    *,
    batch: int = 1,
    context: int | None = None,
) -> dict[str, Any]:
    """``herald-sim run`` of a bidirectional model: recordings of the same decoder and scheduler, ``batch`` at a time.

    Recordings made with the same cache are taken where there are any, else those made without one (``recorded_cache``
    says which). ``context`` replaces the recorded prompts' lengths.

    Raises
    ------
    ConfigError
        The choices do not go with the model or with each other, or there is no recording of them.
    """
    policy = choice.policy(model)
    raise_problems([check_number(batch, "--batch", minimum=1, integer=True)])
    if context is not None:
        raise_problems([check_number(context, "--context", minimum=1, integer=True)])
    if commits is None:
        message = (
            "--scheduler and --cache need --commits: the JSON that herald-exec bench-decoding prints, because what a "
            "schedule and a cache cost follows from which positions were committed when"
        )
        raise ConfigError(message)
    recordings = read_recordings(commits, decoder=choice.decoder, scheduler=choice.scheduler)
    same = [r for r in recordings if r.cache == choice.cache]
    kept = same or [r for r in recordings if r.cache in ("none", "")]
    if not kept:
        message = f"{commits} holds recordings under other caches only; record cache {choice.cache!r} or 'none'"
        raise ConfigError(message)
    if context is not None:
        kept = [replace(r, prompt_tokens=context) for r in kept]
    parts = [
        simulate_decoding(model, profile, kept[first : first + batch], policy.blocks, policy.cached)
        for first in range(0, len(kept), batch)
    ]
    total = {name: sum(part[name] for part in parts) for name in _SUMS}

    def mean(name: str) -> float | None:
        known = [part[name] for part in parts if part[name] is not None]
        return float(np.mean(known)) if known else None

    return {
        "model": model.name,
        "hardware": profile.name,
        "engine": profile.engine.name,
        "method": "dense",
        "decoder": choice.decoder,
        "scheduler": choice.scheduler,
        "cache": choice.cache,
        "recorded_cache": choice.cache if same else "none",
        "requests": len(kept),
        "batch": min(batch, len(kept)),
        **total,
        "tokens_per_forward": total["tokens"] / total["nfe"],
        "throughput_tok_s": total["tokens"] / total["decode_s"],
        "full_forward_ms": mean("full_forward_ms"),
        "short_step_ms": mean("short_step_ms"),
        "extrapolated": sorted({name for part in parts for name in part["extrapolated"]}),
        "provenance": "simulated",
    }
