"""What an acceptance rule is: which masked positions become tokens this step."""

from typing import Any, ClassVar, Protocol

from herald_pipeline.decoding.arrays import Array, column
from herald_pipeline.decoding.registry import Registry
from herald_pipeline.errors import ConfigError


class AcceptanceRule(Protocol):
    """A pure function from confidences to the positions that are committed.

    ``name`` is the registry's; ``needs_confidence`` is false for rules whose order is fixed before the forward;
    ``needs_entropy`` asks for the full distribution's entropy beside the chosen token's probability.
    """

    needs_confidence: ClassVar[bool]
    needs_entropy: ClassVar[bool]

    def __call__(
        self,
        confidence: Array,
        masked: Array,
        *,
        step: Any = 0,
        steps: int = 1,
        entropy: Array | None = None,
    ) -> Array:
        """Positions to commit.

        Parameters
        ----------
        confidence
            ``[rows, L]`` float: probability of the token chosen at each position. Read only where ``masked``.
        masked
            ``[rows, L]`` bool: the candidates (masked and inside the active block).
        step, steps
            Zero-based denoising step of the block (a number or ``[rows]``) and T; used by rules with a schedule.
        entropy
            ``[rows, L]`` float, nats; needed where ``needs_entropy``.

        Returns
        -------
        Array
            ``[rows, L]`` bool, a subset of ``masked`` with at least one entry in every row that has a candidate.
        """


REGISTRY: Registry[AcceptanceRule] = Registry("decoder")


def scheduled_commits(block_length: int, step: Any, steps: int) -> Any:
    """Commits of one step under fixed T: floor(B/T), plus one in the first B mod T steps; at least one.

    ``step`` counts on through blocks that slide (modulo T), so that their rate is the fixed block's.
    Returns a number, or ``[rows, 1]`` when ``step`` is an array.
    """
    if steps < 1:
        message = f"steps must be >= 1, got {steps}"
        raise ConfigError(message)
    base, extra = divmod(block_length, steps)
    commits = base + column((step % steps < extra) * 1)
    # With T > B the last steps have nothing left to commit in a fixed block; in a sliding one they must go on.
    return commits if base >= 1 else commits * 0 + 1
