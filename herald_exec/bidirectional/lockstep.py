"""A cache against no cache, round by round on the same tokens: where the approximation errs, and whether it heals.

Two faults look alike in the final text and apart here (DSB article, section 18). If positions that have just slid out
of the block err far more than distant ones, the prefix window is shorter than the movement. If the error after a full
forward is not zero, versions or the attention mask are wrong: that is a failure, not an approximation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from herald_exec.bidirectional.batch import Batch
from herald_exec.bidirectional.forward import readable
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.bidirectional.loop import Loop
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.policy import DecodingPolicy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import RunError

DISTANCE_EDGES = (-64, -32, -16, -8, 0, 8, 16, 32, 64)
"""Bounds of the distance groups, position - s: [-8, 0) is what lies just left of the block, [0, 8) its first part."""


@dataclass(frozen=True, slots=True)
class RoundDifference:
    """One round of one row.

    ``logit_error``, ``kv_error``: largest absolute difference by group of distance from s, groups without a position
    left out; logits at the positions that the cached run read, K and V at every position. ``refresh_range``: the
    positions computed by a full forward, or ``None``. ``agrees``: without the cache, the round would have committed the
    same tokens at the same positions.
    """

    row: int
    round: int
    s: int
    e: int
    U: int
    committed: int
    forwarded: int
    reused: int
    refresh_range: tuple[int, int] | None
    logit_error: dict[str, float]
    kv_error: dict[str, float]
    max_logit_error: float
    max_kv_error: float
    agrees: bool

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def distance_groups(distance: Tensor, value: Tensor, edges: Sequence[int] = DISTANCE_EDGES) -> dict[str, float]:
    """Largest ``value`` in each group of ``distance`` (both ``[M]``), by a name such as ``[-8,0)``."""
    bounds = [float("-inf"), *edges, float("inf")]
    groups = {}
    for left, right in pairwise(bounds):
        inside = value[(distance >= left) & (distance < right)]
        if inside.numel():
            name = f"[{left:g},{right:g})" if left > float("-inf") else f"(-inf,{right:g})"
            groups[name] = float(inside.max())
    return groups


def _kv_error(one: VersionedKV, other: VersionedKV, length: int) -> Tensor:
    """``[L]``: largest absolute difference of K or V over layers, heads and dimensions."""
    worst = torch.zeros(length, device=one.refreshed.device)
    for a, b in zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True):
        worst = torch.maximum(worst, (a - b).abs().float().amax(dim=(0, 1, 3))[:length])
    return worst


class Lockstep:
    """The cached run of one row, with a full forward of the same tokens beside each of its rounds."""

    def __init__(
        self,
        model: BlockModel,
        row: Batch,
        policy: DecodingPolicy,
        sampler: Sampler | None = None,
        *,
        delimiters: tuple[int, ...] | None = None,
    ) -> None:
        self.model = model
        self.loop = Loop(model, row, policy, sampler, check=True, delimiters=delimiters)

    def step(self, row_number: int) -> RoundDifference:
        """One round; the tokens that follow are the cached run's."""
        loop, model = self.loop, self.model
        plan = loop.plan()
        shifted = model.shape.shifted_logits
        block = loop.masked & loop.state.active(loop.masked)
        read = loop.masked if loop.policy.blocks.needs_delimiters else block
        read = read & readable(plan.forwarded, shifted=shifted)
        exact_kv = VersionedKV.empty(model, *loop.tokens.shape)
        exact, exact_hidden = loop.score(exact_kv, plan.valid, read)
        done = loop.step()
        cached, cached_hidden = done.scores, loop.last_hidden
        error = (model.logits(exact_hidden).float() - model.logits(cached_hidden).float()).abs().amax(dim=-1)
        s = int(done.opened.s[0])
        where = read.nonzero()[:, 1]
        kv_error = _kv_error(exact_kv, loop.kv, int(loop.batch.end[0]))
        _, would = loop.policy.accept(
            done.opened,
            plan,
            loop.masked | done.accepted,
            exact.confidence,
            entropy=exact.entropy,
            delimiter=torch.isin(exact.token, loop.delimiters) & exact.read,
        )
        same = bool((would == done.accepted).all())
        same = same and bool((exact.token == cached.token)[done.accepted].all())
        refreshed = bool(plan.refresh[0])
        return RoundDifference(
            row=row_number,
            round=done.number,
            s=s,
            e=int(done.opened.e[0]),
            U=int(done.opened.U[0]),
            committed=int(done.record.committed[0]),
            forwarded=int(plan.forwarded.sum()),
            reused=int(plan.reused.sum()),
            refresh_range=(0, int(loop.batch.end[0])) if refreshed else None,
            logit_error=distance_groups(where - s, error),
            kv_error=distance_groups(torch.arange(len(kv_error), device=kv_error.device) - s, kv_error),
            max_logit_error=float(error.max()) if error.numel() else 0.0,
            max_kv_error=float(kv_error.max()),
            agrees=same,
        )


@torch.no_grad()
def diff_cache(
    model: BlockModel,
    batch: Batch,
    policy: DecodingPolicy,
    sampler: Sampler | None = None,
    *,
    delimiters: tuple[int, ...] | None = None,
) -> list[RoundDifference]:
    """Every round of every row, rows one at a time (so that both forwards have the same shapes).

    Raises
    ------
    RunError
        After a full forward any logit, key or value differs from the run without a cache: they must be the same bits.
    """
    differences = []
    for index in range(batch.tokens.shape[0]):
        lockstep = Lockstep(model, batch.row(index), policy, sampler, delimiters=delimiters)
        while not lockstep.loop.done:
            difference = lockstep.step(index)
            differences.append(difference)
            if difference.refresh_range is not None and (difference.max_logit_error or difference.max_kv_error):
                message = (
                    f"cache {policy.cache!r} differs from no cache right after a full forward: row {index}, round "
                    f"{difference.round}, logits by {difference.max_logit_error:g}, KV by {difference.max_kv_error:g}; "
                    "both must be 0, so a version or the attention mask is wrong"
                )
                raise RunError(message)
    return differences


def summary(differences: Sequence[RoundDifference]) -> dict[str, Any]:
    """Largest errors by distance over all rounds that were no full forward, and how often the commits agree."""
    between = [d for d in differences if d.refresh_range is None]

    def worst(name: str) -> dict[str, float]:
        groups: dict[str, float] = {}
        for difference in between:
            for group, value in getattr(difference, name).items():
                groups[group] = max(value, groups.get(group, 0.0))
        return groups

    return {
        "rounds": len(differences),
        "refreshes": len(differences) - len(between),
        "agreeing_rounds": sum(d.agrees for d in differences),
        "logit_error_by_distance": worst("logit_error"),
        "kv_error_by_distance": worst("kv_error"),
    }
