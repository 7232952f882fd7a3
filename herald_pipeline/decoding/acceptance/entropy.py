"""Entropy-bounded acceptance: as many positions as the uncertainty allowance covers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from herald_pipeline.decoding.acceptance.base import REGISTRY
from herald_pipeline.decoding.arrays import Array, array_namespace, rank_descending
from herald_pipeline.errors import ConfigError, check_number, raise_problems


@dataclass(frozen=True, slots=True)
class Entropy:
    """Commit the candidates of lowest entropy while their running sum stays <= ``gamma`` nats; at least one.

    The full distribution's entropy is meant (JetEngine); SDAR's own branch of this name cannot run as published.
    """

    gamma: float = 0.35

    needs_confidence: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_problems([check_number(self.gamma, "gamma", minimum=0)])

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
        if entropy is None:
            message = "decoder 'entropy' needs the entropy of each position: pass entropy=[rows, L]"
            raise ConfigError(message)
        xp = array_namespace(entropy, masked)
        key = xp.where(masked, entropy, float("inf"))
        order = xp.argsort(key, axis=-1, stable=True)
        allowed = xp.cumulative_sum(xp.take_along_axis(key, order, axis=-1), axis=-1) <= self.gamma
        number = xp.sum(xp.astype(allowed, xp.int64), axis=-1)[:, None]
        rank = rank_descending(-entropy, masked)
        return masked & ((rank < number) | (rank == 0))


REGISTRY.add("entropy", Entropy, "JetEngine entropy_bounded (gamma 0.35; 0.6 also in use)")
