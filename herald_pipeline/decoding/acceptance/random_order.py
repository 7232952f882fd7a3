"""Random order: positions in an order drawn before the forward, so that their turn is known without logits.

This is LLaDA's "random" remasking, and the only kind of rule under which dKV-Cache-greedy can say which positions
come next (dKV-Cache, appendix; its released code supports random remasking only).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from herald_pipeline.decoding.acceptance.base import REGISTRY, scheduled_commits
from herald_pipeline.decoding.arrays import Array, array_namespace, positions, rank_descending
from herald_pipeline.decoding.sampling import hash_uniform
from herald_pipeline.errors import check_number, raise_problems


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Fixed-T counts, taken in an order that depends on the seed and the position alone.

    ``block_length`` is B of the schedule; the arrays' width when not given. Confidences are not read.
    """

    seed: int = 0
    block_length: int | None = None

    needs_confidence: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.seed, "seed", minimum=0, integer=True),
                None
                if self.block_length is None
                else check_number(self.block_length, "block_length", minimum=1, integer=True),
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
        xp = array_namespace(masked)
        turn = hash_uniform(positions(masked) + xp.astype(masked, xp.int64) * 0, self.seed)
        wanted = scheduled_commits(self.block_length or masked.shape[-1], step, steps)
        return masked & (rank_descending(turn, masked) < wanted)


REGISTRY.add("random", RandomOrder, "LLaDA random remasking; dKV-Cache-greedy")
