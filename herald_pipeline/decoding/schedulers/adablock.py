"""AdaBlock: a block ends at the delimiter that the model is surest of, if it is sure enough."""

from dataclasses import dataclass, replace
from typing import ClassVar

from herald_pipeline.decoding.arrays import Array, array_namespace, best_one, first_true, positions
from herald_pipeline.decoding.schedulers.base import (
    REGISTRY,
    BlockState,
    commit,
    initial_state,
    keep_done,
    leftmost_mask,
)
from herald_pipeline.errors import ConfigError, check_number, raise_problems

LLADA_DELIMITERS = (198,)
"""LLaDA's newline token (AdaBlock's released setting, with threshold 0.3)."""
DREAM_DELIMITERS = (
    *(198, 271, 280, 319, 340, 382, 401, 532, 624, 630, 692, 698, 921, 1248, 1837, 1939),
    *(2219, 2533, 3276, 3876, 4894, 5267, 14750, 68327),
)
"""Dream's tokens that end in a newline (AdaBlock's released setting, with threshold 0.5)."""


@dataclass(frozen=True, slots=True)
class AdaBlock:
    """Blocks that end at a delimiter.

    In a block's first round, after its forward: among the next min(int(``window_share`` x response), remaining)
    positions whose chosen token is a delimiter, the most probable; if its probability is >= ``delimiter_threshold``,
    the block ends with it, else after min(``block``, remaining) positions. That round commits tokens too.
    A block that is not opened yet has e == s.
    """

    block: int = 32
    delimiter_threshold: float = 0.3
    window_share: float = 0.25

    slides: ClassVar[bool] = False
    needs_delimiters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.block, "block", minimum=1, integer=True),
                check_number(self.delimiter_threshold, "delimiter_threshold", above=0, maximum=1),
                check_number(self.window_share, "window_share", above=0, maximum=1),
            ]
        )

    @property
    def block_length(self) -> int:
        """B of blocks without a delimiter."""
        return self.block

    def start(self, prompt_length: Array, response_length: Array) -> BlockState:
        """See :class:`~herald_pipeline.decoding.schedulers.base.Scheduler`; the first block is not opened."""
        state = initial_state(prompt_length, response_length, self.block)
        return replace(state, e=state.s)

    def open(self, state: BlockState, confidence: Array, delimiter: Array | None) -> BlockState:
        """Set e of the blocks not opened yet.

        ``delimiter``: ``[rows, L]`` bool, the token chosen at that position is a delimiter. ``confidence`` is read in
        the window only.
        """
        if delimiter is None:
            message = "scheduler 'adablock' needs delimiter=[rows, L]: which chosen tokens are delimiters"
            raise ConfigError(message)
        xp = array_namespace(confidence, delimiter)
        share = xp.astype(xp.floor(xp.astype(state.end - state.prompt, xp.float64) * self.window_share), xp.int64)
        window_end = xp.minimum(state.s + share, state.end)
        place = positions(delimiter)
        window = (place >= state.s[:, None]) & (place < window_end[:, None])
        sure = window & delimiter & (confidence >= self.delimiter_threshold)
        default = xp.minimum(state.s + self.block, state.end)
        chosen = first_true(best_one(confidence, sure), default - 1) + 1
        return replace(state, e=xp.where(state.e == state.s, chosen, state.e))

    def advance(self, state: BlockState, masked: Array, accepted: Array) -> BlockState:
        """The block stays until it is clean; the next one starts at its end, not opened."""
        xp = array_namespace(masked)
        after, left = commit(state, masked, accepted)
        clean = leftmost_mask(after, left) == after.e
        after = replace(
            after,
            s=xp.where(clean, after.e, after.s),
            step=xp.where(clean, after.step * 0, after.step),
        )
        return keep_done(state, after)


REGISTRY.add("adablock", AdaBlock, "AdaBlock-dLLM (released code: 0.3 for LLaDA, 0.5 for Dream)")
