"""Dynamic Sliding Block: both edges of the active block follow what has been committed (DSB, Algorithm 1).

Each round, in this order: commit inside the *old* block, U += commits, s = leftmost mask of the old block (its e where
it is clean), e = min(prompt + S_init + U, s + S_max), cut at the response's end. Raising e first would count commits
that the block did not allow.
"""

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
class DynamicSlidingBlock:
    """DSB with ``s_init`` and ``s_max`` (None: unbounded, the greedy form; equal to ``s_init``: the constant form).

    ``s_max`` below ``s_init`` is refused: the first block would break its own limit.
    """

    s_init: int = 32
    s_max: int | None = None

    slides: ClassVar[bool] = True
    needs_delimiters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.s_init, "s_init", minimum=1, integer=True),
                None if self.s_max is None else check_number(self.s_max, "s_max (--s-max)", minimum=1, integer=True),
                self._too_short(),
            ]
        )

    def _too_short(self) -> str | None:
        if self.s_max is None or not 1 <= self.s_max < self.s_init:
            return None
        return (
            f"s_max must be >= s_init, the block that it caps: got {self.s_max} and {self.s_init}; raise --s-max or "
            "lower --block"
        )

    @property
    def block_length(self) -> int:
        """S_init."""
        return self.s_init

    def start(self, prompt_length: Array, response_length: Array) -> BlockState:
        """See :class:`~herald_pipeline.decoding.schedulers.base.Scheduler`."""
        return initial_state(prompt_length, response_length, self.s_init)

    def open(self, state: BlockState, confidence: Array, delimiter: Array | None) -> BlockState:
        """Nothing to fix: the edges depend on commits alone."""
        return state

    def advance(self, state: BlockState, masked: Array, accepted: Array) -> BlockState:
        """Algorithm 1's updates, in its order."""
        xp = array_namespace(masked)
        after, left = commit(state, masked, accepted)
        s = leftmost_mask(after, left)
        e = xp.minimum(after.prompt + self.s_init + after.U, after.end)
        if self.s_max is not None:
            e = xp.minimum(e, s + self.s_max)
        return keep_done(state, replace(after, s=s, e=e))


@dataclass(frozen=True, slots=True)
class DsbConst(DynamicSlidingBlock):
    """DSB(const): ``s_max`` is ``s_init`` when not given."""

    def __post_init__(self) -> None:
        if self.s_max is None:
            object.__setattr__(self, "s_max", self.s_init)
        DynamicSlidingBlock.__post_init__(self)


REGISTRY.add("dsb-const", DsbConst, "DSB Algorithm 1, S_max = S_init")
REGISTRY.add("dsb-greedy", DynamicSlidingBlock, "DSB Algorithm 1, S_max unbounded unless given")
