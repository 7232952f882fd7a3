"""Fixed blocks ("Naive" in the DSB article): [kB, (k+1)B) until it is clean, then the next."""

from dataclasses import dataclass, replace
from typing import ClassVar

from herald_pipeline.decoding.arrays import Array, array_namespace
from herald_pipeline.decoding.schedulers.base import (
    REGISTRY,
    BlockState,
    commit,
    initial_state,
    keep_done,
    leftmost_mask,
)
from herald_pipeline.errors import check_number, raise_problems


@dataclass(frozen=True, slots=True)
class Fixed:
    """Blocks of ``block`` positions from the prompt's end; the last one may be shorter."""

    block: int = 32

    slides: ClassVar[bool] = False
    needs_delimiters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems([check_number(self.block, "block", minimum=1, integer=True)])

    @property
    def block_length(self) -> int:
        """B."""
        return self.block

    def start(self, prompt_length: Array, response_length: Array) -> BlockState:
        """See :class:`~herald_pipeline.decoding.schedulers.base.Scheduler`."""
        return initial_state(prompt_length, response_length, self.block)

    def open(self, state: BlockState, confidence: Array, delimiter: Array | None) -> BlockState:
        """Nothing to fix: the length is known beforehand."""
        return state

    def advance(self, state: BlockState, masked: Array, accepted: Array) -> BlockState:
        """The block stays until it is clean; then [e, e + B), cut at the end."""
        xp = array_namespace(masked)
        after, left = commit(state, masked, accepted)
        clean = leftmost_mask(after, left) == after.e
        after = replace(
            after,
            s=xp.where(clean, after.e, after.s),
            e=xp.where(clean, xp.minimum(after.e + self.block, after.end), after.e),
            step=xp.where(clean, after.step * 0, after.step),
        )
        return keep_done(state, after)


REGISTRY.add("fixed", Fixed, "DSB article section 2 (Naive); Fast-dLLM, HERALD")
