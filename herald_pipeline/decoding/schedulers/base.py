"""What a block scheduler is: where a request may commit next.

The active block of round t is the half-open range [s, e) in absolute positions (prompt first). A round is, in this
order: forward over the active block (and whatever the cache rule adds), :meth:`Scheduler.open`, acceptance among the
masked positions of [s, e), :meth:`Scheduler.advance`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from herald_pipeline.decoding.arrays import Array, array_namespace, count, first_true, positions
from herald_pipeline.decoding.registry import Registry


@dataclass(frozen=True, slots=True)
class BlockState:
    """Where each request stands; every field is ``[rows]`` int64.

    ``s``, ``e``: the active block [s, e). ``U``: tokens of the response committed so far, in the whole answer (not of
    this block, not rounds). ``prompt``: first position of the response. ``end``: one past the last.
    ``step``: rounds since the block was opened (0 in its first round; counts on where the block slides).
    """

    s: Array
    e: Array
    U: Array
    prompt: Array
    end: Array
    step: Array

    @property
    def done(self) -> Array:
        """``[rows]`` bool: the whole response is committed."""
        return self.prompt + self.U >= self.end

    def active(self, like: Array) -> Array:
        """``[rows, L]`` bool: positions of the active block, of the width of ``like [rows, L]``."""
        place = positions(like)
        return (place >= self.s[:, None]) & (place < self.e[:, None])

    def valid(self, like: Array) -> Array:
        """``[rows, L]`` bool: positions of the sequence; the rest pads a ragged batch."""
        return positions(like) < self.end[:, None]


class Scheduler(Protocol):
    """A rule for [s, e).

    ``slides``: s moves inside a block (DSB); caches then refresh by committed tokens, else at block starts.
    ``needs_delimiters``: :meth:`open` wants to know which positions would become a delimiter.
    """

    slides: ClassVar[bool]
    needs_delimiters: ClassVar[bool]

    @property
    def block_length(self) -> int:
        """B, or S_init: the block's first length, and the period of refreshes under sliding blocks."""

    def start(self, prompt_length: Array, response_length: Array) -> BlockState:
        """State before the first round; both arguments are ``[rows]`` int64 arrays, responses >= 1."""

    def open(self, state: BlockState, confidence: Array, delimiter: Array | None) -> BlockState:
        """Fix e of blocks that were not opened yet, from this round's logits; others stay."""

    def advance(self, state: BlockState, masked: Array, accepted: Array) -> BlockState:
        """State of the next round.

        ``masked``: ``[rows, L]`` bool before this round's commits; ``accepted``: this round's commits, inside it.
        """


REGISTRY: Registry[Scheduler] = Registry("scheduler")


def initial_state(prompt_length: Array, response_length: Array, block_length: int) -> BlockState:
    """State with [prompt, prompt + block_length) active, cut at the response's end."""
    xp = array_namespace(prompt_length, response_length)
    prompt = xp.astype(prompt_length, xp.int64)
    end = prompt + xp.astype(response_length, xp.int64)
    zero = prompt * 0
    return BlockState(
        s=prompt,
        e=xp.minimum(prompt + block_length, end),
        U=zero,
        prompt=prompt,
        end=end,
        step=zero,
    )


def commit(state: BlockState, masked: Array, accepted: Array) -> tuple[BlockState, Array]:
    """State with U raised by this round's commits, and ``[rows, L]`` what is masked after them."""
    number = count(accepted)
    return replace(state, U=state.U + number, step=state.step + 1), masked & ~accepted


def leftmost_mask(state: BlockState, masked: Array) -> Array:
    """``[rows]``: leftmost masked position of [s, e), or e where the block is clean."""
    return first_true(masked & state.active(masked), state.e)


def keep_done(before: BlockState, after: BlockState) -> BlockState:
    """``after``, except in rows that had finished before the round: their state stays as it was."""
    xp = array_namespace(before.s)
    done = before.done

    def keep(old: Any, new: Any) -> Any:
        return xp.where(done, old, new)

    return BlockState(
        s=keep(before.s, after.s),
        e=keep(before.e, after.e),
        U=keep(before.U, after.U),
        prompt=before.prompt,
        end=before.end,
        step=keep(before.step, after.step),
    )
