"""A decoding policy: acceptance rule x block scheduler x cache rule, and which of them go together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herald_pipeline.decoding import acceptance, caches, schedulers
from herald_pipeline.decoding.acceptance import AcceptanceRule
from herald_pipeline.decoding.arrays import Array
from herald_pipeline.decoding.caches import CacheRule, CacheState, ForwardPlan
from herald_pipeline.decoding.schedulers import BlockState, Scheduler
from herald_pipeline.errors import ConfigError

MASKED_DIFFUSION_THRESHOLD = 0.9
"""Confidence threshold of Fast-dLLM and DSB on LLaDA and Dream."""
DREAM_DELIMITER_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class DecodingPolicy:
    """The three choices with their names; :meth:`accept` and :meth:`advance` are the pure halves of a round."""

    decoder: str
    scheduler: str
    cache: str
    rule: AcceptanceRule
    blocks: Scheduler
    cached: CacheRule
    steps: int = 32

    def accept(
        self,
        state: BlockState,
        plan: ForwardPlan,
        masked: Array,
        confidence: Array,
        *,
        entropy: Array | None = None,
        delimiter: Array | None = None,
    ) -> tuple[BlockState, Array]:
        """The block as this round's logits open it, and ``[rows, L]`` bool what is committed in it."""
        opened = self.blocks.open(state, confidence, delimiter)
        # A row that was stopped at its EOS may still hold masks.
        candidates = masked & opened.active(masked) & ~opened.done[:, None]
        accepted = self.rule(confidence, candidates, step=opened.step, steps=self.steps, entropy=entropy)
        return opened, self.cached.restrict(plan, opened, masked, accepted)

    def advance(
        self, cache: CacheState, plan: ForwardPlan, opened: BlockState, masked: Array, accepted: Array
    ) -> tuple[BlockState, CacheState]:
        """Block and cache state of the next round."""
        after = self.blocks.advance(opened, masked, accepted)
        return after, self.cached.observe(cache, plan, opened, after, accepted, self.blocks)


def make_policy(
    decoder: str = "confidence",
    scheduler: str = "fixed",
    cache: str = "none",
    *,
    steps: int = 32,
    bidirectional: bool = True,
    decoder_params: Mapping[str, Any] | None = None,
    scheduler_params: Mapping[str, Any] | None = None,
    cache_params: Mapping[str, Any] | None = None,
) -> DecodingPolicy:
    """Policy by names.

    Schedules of fixed T (``static`` and the fallbacks) count in the scheduler's block length, ``steps`` a block.

    Raises
    ------
    ConfigError
        Unknown names or parameters, refused values, or a combination that makes no sense (with the table).
    """
    blocks = schedulers.get(scheduler, **(scheduler_params or {}))
    known = acceptance.REGISTRY.parameters(decoder)
    scheduled = {"block_length": blocks.block_length} if "block_length" in known else {}
    rule = acceptance.get(decoder, **{**scheduled, **(decoder_params or {})})
    cached = caches.get(cache, **(cache_params or {}))
    problem = combination_problem(decoder, scheduler, cache, bidirectional=bidirectional)
    if problem is not None:
        raise ConfigError([problem, combination_table()])
    if steps < 1:
        message = f"steps must be >= 1, got {steps}"
        raise ConfigError(message)
    return DecodingPolicy(decoder, scheduler, cache, rule, blocks, cached, steps)


def model_policy(
    decoder: str,
    scheduler: str,
    cache: str,
    *,
    shifted_logits: bool,
    bidirectional: bool = True,
    threshold: float | None = None,
    block: int = 32,
    s_max: int | None = None,
    prefix_window: int | None = None,
    steps: int = 32,
) -> DecodingPolicy:
    """Policy for a bidirectional model, with what the papers set by model where nothing is given.

    Parameters
    ----------
    shifted_logits
        True for Dream: AdaBlock's delimiter threshold is then 0.5 instead of 0.3, and p_min 4 instead of 24.
    threshold
        Of a decoder that has one; 0.9 for ``confidence`` (masked-diffusion models), else the decoder's own default.
    block
        B of ``fixed`` and ``adablock``, S_init of the sliding schedulers.
    s_max, prefix_window
        For the schedulers and caches that have them; refused elsewhere.
    """
    blocks = schedulers.REGISTRY.parameters(scheduler)
    decoder_params: dict[str, Any] = {}
    if threshold is not None:
        decoder_params["threshold"] = threshold
    elif decoder == "confidence":
        decoder_params["threshold"] = MASKED_DIFFUSION_THRESHOLD
    scheduler_params: dict[str, Any] = {("s_init" if "s_init" in blocks else "block"): block}
    if "delimiter_threshold" in blocks and shifted_logits:
        scheduler_params["delimiter_threshold"] = DREAM_DELIMITER_THRESHOLD
    if s_max is not None:
        scheduler_params["s_max"] = s_max
    cache_params: dict[str, Any] = {}
    if prefix_window is not None:
        cache_params["prefix_window"] = prefix_window
    elif cache == "dsb" and shifted_logits:
        cache_params["prefix_window"] = caches.DREAM_PREFIX_WINDOW
    return make_policy(
        decoder,
        scheduler,
        cache,
        steps=steps,
        bidirectional=bidirectional,
        decoder_params=decoder_params,
        scheduler_params=scheduler_params,
        cache_params=cache_params,
    )


def combination_problem(decoder: str, scheduler: str, cache: str, *, bidirectional: bool) -> str | None:
    """Why the three cannot go together, or ``None``."""
    rule = acceptance.REGISTRY.entry(decoder).policy
    blocks = schedulers.REGISTRY.entry(scheduler).policy
    cached = caches.REGISTRY.entry(cache).policy
    if not bidirectional and scheduler != "fixed":
        return (
            f"scheduler {scheduler!r} needs a bidirectional model: a block-causal model's mask fixes where blocks end; "
            "use scheduler 'fixed'"
        )
    if not bidirectional and cache != "none":
        return (
            f"cache {cache!r} needs a bidirectional model: a block-causal model's KV cache is exact, nothing in it "
            "ages; use cache 'none'"
        )
    if cached.needs_upcoming and rule.needs_confidence:  # type: ignore[attr-defined]
        return (
            f"cache {cache!r} must know a round's commits before its forward, and decoder {decoder!r} reads the "
            "forward's confidences; use decoder 'random'"
        )
    if cached.needs_upcoming and blocks.needs_delimiters:  # type: ignore[attr-defined]
        return (
            f"cache {cache!r} must know a round's commits before its forward, and scheduler {scheduler!r} reads the "
            "forward for the block's end; use scheduler 'fixed'"
        )
    return None


def combination_table() -> str:
    """Which choices go together, as text."""
    return "\n".join(
        [
            "what goes together:",
            "  block-causal models (SDAR, LLaDA2): any decoder; scheduler fixed; cache none",
            f"  bidirectional models (LLaDA, Dream): decoders {', '.join(acceptance.names())};",
            f"    schedulers {', '.join(schedulers.names())}; caches {', '.join(caches.names())};",
            "    cache dkv-greedy only with decoder random, and not with scheduler adablock",
        ]
    )
