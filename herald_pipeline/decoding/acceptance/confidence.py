"""Threshold on confidence, in the forms that engines give it.

They differ in three things: whether the threshold itself passes, what is committed when too few pass, and the default.
Each engine's form has a name of its own, because users compare results across engines.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from herald_pipeline.decoding.acceptance.base import REGISTRY, scheduled_commits
from herald_pipeline.decoding.arrays import (
    Array,
    array_namespace,
    best_one,
    count,
    positions,
    rank_descending,
)
from herald_pipeline.errors import ConfigError, check_number, raise_problems

Fallback = Literal["best", "schedule", "leftmost"]


@dataclass(frozen=True, slots=True)
class Confidence:
    """Commit every candidate whose confidence passes ``threshold``.

    Parameters
    ----------
    threshold
        Probability in (0, 1].
    strict
        True for ``p > threshold`` (sglang, LLaDA2, SDAR, JetEngine, Fast-dLLM v2), false for ``p >= threshold``.
    fallback
        ``best``: the most confident candidate when none passes.
        ``schedule``: when fewer than the fixed-T schedule's count pass, the most confident of that count instead.
        ``leftmost``: as ``schedule``, but the leftmost candidates of that count (JetEngine).
    block_length
        B of the schedule; the arrays' width when not given.
    """

    threshold: float = 0.95
    strict: bool = False
    fallback: Fallback = "best"
    block_length: int | None = None

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.threshold, "threshold", above=0, maximum=1),
                None
                if self.block_length is None
                else check_number(self.block_length, "block_length", minimum=1, integer=True),
            ]
        )
        if self.fallback not in ("best", "schedule", "leftmost"):
            message = f"fallback must be best, schedule or leftmost, got {self.fallback!r}"
            raise ConfigError(message)

    def __call__(
        self,
        confidence: Array,
        masked: Array,
        *,
        step: Any = 0,
        steps: int = 1,
        entropy: Array | None = None,
    ) -> Array:
        """See :class:`~herald_pipeline.decoding.acceptance.base.AcceptanceRule`."""
        passed = confidence > self.threshold if self.strict else confidence >= self.threshold
        passed = passed & masked
        if self.fallback == "best":
            # Whenever anything passes, the best one is among it: adding it always is the same rule.
            return passed | best_one(confidence, masked)
        xp = array_namespace(confidence, masked)
        wanted = scheduled_commits(self.block_length or masked.shape[-1], step, steps)
        if self.fallback == "schedule":
            rank = rank_descending(confidence, masked)
        else:
            rank = xp.cumulative_sum(xp.astype(masked, xp.int64), axis=-1) - 1
        return xp.where(count(passed)[:, None] >= wanted, passed, masked & (rank < wanted))


@dataclass(frozen=True, slots=True)
class RelativeConfidence:
    """Commit candidates with p >= min(threshold, best p - margin): dInfer's rule, which so always takes the best.

    dInfer also never commits a predicted MASK; here the sampler leaves that token out of its choice for every rule.
    """

    threshold: float = 0.9
    margin: float = 1e-5

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.threshold, "threshold", above=0, maximum=1),
                check_number(self.margin, "margin", minimum=0, maximum=1),
            ]
        )

    def __call__(
        self,
        confidence: Array,
        masked: Array,
        *,
        step: Any = 0,
        steps: int = 1,
        entropy: Array | None = None,
    ) -> Array:
        """See :class:`~herald_pipeline.decoding.acceptance.base.AcceptanceRule`."""
        xp = array_namespace(confidence, masked)
        best = xp.max(xp.where(masked, confidence, -float("inf")), axis=-1)[:, None]
        passed = (confidence >= self.threshold) | (confidence >= best - self.margin)
        return (passed & masked) | best_one(confidence, masked)


@dataclass(frozen=True, slots=True)
class ConfidenceFactor:
    """Commit the n most confident candidates, n the largest with p_(n) >= 1 - factor / (n + 1); at least one.

    Fast-dLLM's "factor" rule: the bar rises with the number of tokens committed together.
    """

    factor: float = 1.0

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems([check_number(self.factor, "factor", above=0)])

    def __call__(
        self,
        confidence: Array,
        masked: Array,
        *,
        step: Any = 0,
        steps: int = 1,
        entropy: Array | None = None,
    ) -> Array:
        """See :class:`~herald_pipeline.decoding.acceptance.base.AcceptanceRule`."""
        xp = array_namespace(confidence, masked)
        rank = rank_descending(confidence, masked)
        # The n-th of the falling order has rank n - 1; the largest n that passes takes all before it along.
        passed = masked & (confidence >= 1 - self.factor / (xp.astype(rank, confidence.dtype) + 2))
        largest = xp.max(xp.where(passed, rank, positions(rank) * 0), axis=-1)
        return masked & (rank <= largest[:, None])


REGISTRY.add("confidence", Confidence, "HERALD section IV-B; DSB article section 2 (p >= threshold, best-one fallback)")
REGISTRY.add("confidence-sglang", Confidence, "sglang LowConfidence", threshold=0.95, strict=True)
REGISTRY.add(
    "confidence-llada2",
    Confidence,
    "LLaDA2 reference generate",
    threshold=0.95,
    strict=True,
    fallback="schedule",
)
REGISTRY.add(
    "confidence-sdar",
    Confidence,
    "SDAR low_confidence_dynamic",
    threshold=0.85,
    strict=True,
    fallback="schedule",
)
REGISTRY.add(
    "confidence-jetengine",
    Confidence,
    "JetEngine dynamic",
    threshold=0.9,
    strict=True,
    fallback="leftmost",
)
REGISTRY.add("confidence-lmdeploy", Confidence, "lmdeploy dynamic", threshold=0.85)
REGISTRY.add("confidence-dinfer", RelativeConfidence, "dInfer threshold")
REGISTRY.add("confidence-fast-dllm", Confidence, "Fast-dLLM v1, DSB, AdaBlock", threshold=0.9)
REGISTRY.add("confidence-fast-dllm-v2", Confidence, "Fast-dLLM v2", threshold=0.95, strict=True)
REGISTRY.add("factor-fast-dllm", ConfidenceFactor, "Fast-dLLM factor")
