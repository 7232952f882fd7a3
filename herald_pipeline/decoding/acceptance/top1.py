"""Top-1: the single most confident position each step (LLaDA's low-confidence remasking, one token a step)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from herald_pipeline.decoding.acceptance.base import REGISTRY
from herald_pipeline.decoding.arrays import Array, best_one


@dataclass(frozen=True, slots=True)
class Top1:
    """Commit the most confident candidate of each row. Reference for quality, not for speed (DSB article, 2)."""

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False

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
        return best_one(confidence, masked)


REGISTRY.add("top1", Top1, "DSB article section 2")
