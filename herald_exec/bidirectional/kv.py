"""KV of whole sequences in which every position carries the round that computed it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.caches import ForwardPlan
from herald_pipeline.errors import RunError


@dataclass(slots=True)
class VersionedKV:
    """Keys and values by layer, ``[R, kv, L, d]`` each, and ``version [layers, R, L]``.

    ``version`` is the round that computed an entry, -1 for never; it is written together with the entry, and ``None``
    where nobody checks it.
    ``refreshed [R]``: the last round that computed a whole row.
    """

    keys: list[Tensor]
    values: list[Tensor]
    version: Tensor | None
    refreshed: Tensor

    @classmethod
    def empty(cls, model: BlockModel, rows: int, length: int, versions: bool = True) -> "VersionedKV":
        """Nothing computed yet; zeros, so that padding never holds a NaN."""
        shape = model.shape
        size = (rows, shape.num_kv_heads, length, shape.head_dim)

        def layers() -> list[Tensor]:
            return [torch.zeros(size, dtype=model.kv_dtype, device=model.device) for _ in range(shape.num_layers)]

        version = None
        if versions:
            version = torch.full((shape.num_layers, rows, length), -1, dtype=torch.int64, device=model.device)
        refreshed = torch.full((rows,), -1, dtype=torch.int64, device=model.device)
        return cls(layers(), layers(), version, refreshed)

    def write(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor, round_number: int) -> None:
        """Put ``k``, ``v`` ``[N, kv, d]`` at (rows, positions) ``[N]`` over what was there."""
        self.keys[layer][rows, :, positions] = k
        self.values[layer][rows, :, positions] = v
        if self.version is not None:
            self.version[layer, rows, positions] = round_number

    def check(self, plan: ForwardPlan, round_number: int) -> None:
        """Assert that this round's positions are this round's, and that nothing reused is older than the last refresh.

        Raises
        ------
        RunError
            With the first layer, row, position and the two rounds.
        """
        if self.version is None:
            message = "entries carry no round: make the cache with versions to check it"
            raise RunError(message)
        stale = plan.forwarded[None] & (self.version != round_number)
        self._raise_if(stale, self.version, "active and window positions must be computed in this round", round_number)
        old = plan.reused[None] & (self.version < self.refreshed[None, :, None])
        self._raise_if(old, self.version, "no reused position may be older than the last refresh", round_number)
        never = plan.reused[None] & (self.version < 0)
        self._raise_if(never, self.version, "a reused position must have been computed", round_number)

    def _raise_if(self, wrong: Tensor, version: Tensor, rule: str, round_number: int) -> None:
        if not bool(wrong.any()):
            return
        layer, row, position = (int(index) for index in wrong.nonzero()[0])
        message = (
            f"{rule}: layer {layer}, row {row}, position {position} carries round "
            f"{int(version[layer, row, position])} in round {round_number} "
            f"(last refresh: round {int(self.refreshed[row])})"
        )
        raise RunError(message)
