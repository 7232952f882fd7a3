"""Fixed T: a set number of commits each step, whatever the confidences."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from herald_pipeline.decoding.acceptance.base import REGISTRY, scheduled_commits
from herald_pipeline.decoding.arrays import Array, array_namespace, rank_descending
from herald_pipeline.errors import ConfigError, check_number, raise_problems


@dataclass(frozen=True, slots=True)
class Static:
    """Step i commits floor(B/T), plus one in the first B mod T steps, by falling confidence or from the left.

    A row with fewer masks than B (a prompt tail shares its block) follows the same counts and finishes earlier.
    ``block_length`` is B; the arrays' width when not given. ``order``: ``confidence`` or ``sequential``.
    """

    block_length: int | None = None
    order: Literal["confidence", "sequential"] = "confidence"

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.block_length is not None:
            raise_problems([check_number(self.block_length, "block_length", minimum=1, integer=True)])
        if self.order not in ("confidence", "sequential"):
            message = f"order must be confidence or sequential, got {self.order!r}"
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
        xp = array_namespace(confidence, masked)
        if self.order == "confidence":
            rank = rank_descending(confidence, masked)
        else:
            rank = xp.cumulative_sum(xp.astype(masked, xp.int64), axis=-1) - 1
        return masked & (rank < scheduled_commits(self.block_length or masked.shape[-1], step, steps))


REGISTRY.add("static", Static, "HERALD section V (fixed T); low_confidence_static of SDAR and JetEngine")
REGISTRY.add("sequential", Static, "JetEngine sequential", order="sequential")
