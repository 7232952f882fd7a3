"""One forward over any set of positions of a ragged batch, against keys of all positions.

Sizes are read back from the device once a forward, all together (:func:`extent_of`); everything else stays in its
queue.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from herald_exec.attention import attend
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.models.base import BlockModel

LOGIT_VALUES = 1 << 27
"""Logits that exist at a time: in fp32 half a gigabyte, 1,061 positions of LLaDA's 126,464 tokens."""


class Part(NamedTuple):
    """Rows of one kind: how many, the most positions of one of them, positions in all."""

    rows: int
    longest: int
    positions: int

    @property
    def even(self) -> bool:
        """Every row has as many positions as the longest."""
        return self.positions == self.rows * self.longest


class Extent(NamedTuple):
    """Sizes of a forward: rows computed whole, rows computed in part, positions that are read, and flagged rows."""

    whole: Part
    partial: Part
    read: int
    flagged: int

    @property
    def positions(self) -> int:
        """Positions computed."""
        return self.whole.positions + self.partial.positions


def extent_of(forwarded: Tensor, end: Tensor, read: Tensor, flagged: Tensor | None = None) -> Extent:
    """Sizes of a forward, in one transfer; ``flagged [R]`` bool is counted along."""
    count = forwarded.sum(dim=1)
    parts = [torch.where(kind, count, 0) for kind in (count == end, count < end)]
    numbers = [number for part in parts for number in ((part > 0).sum(), part.amax(), part.sum())]
    numbers += [read.sum(), end.new_zeros(()) if flagged is None else flagged.sum()]
    found = torch.stack(numbers).tolist()
    return Extent(Part(*found[:3]), Part(*found[3:6]), *found[6:])


def true_indices(mask: Tensor, number: int) -> Tensor:
    """``[number]``: where ``mask`` (flat) is true, in order; the number is known, so nothing is read back."""
    place = torch.where(mask, mask.cumsum(dim=0) - 1, number)
    # What is false is written to one entry behind the last.
    found = place.new_empty(number + 1)
    found.scatter_(0, place, torch.arange(mask.numel(), device=mask.device))
    return found[:number]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together, padded to the longest of them; ``None`` stands for all rows, or all positions.

    ``rows [Rg]``; ``members [Ng]``: their positions among those of the forward; ``local``, ``slot [Ng]``: each
    position's row in the group and place in it. ``even``: no padding.
    """

    rows: Tensor | None
    members: Tensor | None
    local: Tensor
    slot: Tensor
    part: Part


@dataclass(frozen=True, slots=True)
class Places:
    """Where the positions of a forward lie, found once for all layers.

    ``rows``, ``positions [N]``; ``index [R, L]``: the place of a forwarded position in that order.
    """

    rows: Tensor
    positions: Tensor
    index: Tensor
    groups: tuple[Group, ...]


def places_of(forwarded: Tensor, end: Tensor, extent: Extent) -> Places:
    """Positions of a forward in order, and the groups that attend together.

    Rows computed whole (a refresh) and rows of which only a block is computed are apart: padded together, the few
    positions of a block would cost a whole row's attention. Rows of which nothing is computed are in neither.
    """
    num_rows, width = forwarded.shape
    flat = true_indices(forwarded.flatten(), extent.positions)
    rows, positions = flat // width, flat % width
    index = (forwarded.flatten().cumsum(dim=0) - 1).view_as(forwarded)
    count = forwarded.sum(dim=1)
    slot = (forwarded.cumsum(dim=1) - 1)[rows, positions]
    kinds = [
        (part, kind)
        for part, kind in ((extent.whole, count == end), (extent.partial, (count < end) & (count > 0)))
        if part.rows
    ]
    groups = []
    for part, kind in kinds:
        alone = len(kinds) == 1
        members = None if alone else true_indices(kind[rows], part.positions)
        chosen = None if part.rows == num_rows else true_indices(kind, part.rows)
        local = (kind.cumsum(dim=0) - 1)[rows]
        here = (local, slot) if members is None else (local[members], slot[members])
        groups.append(Group(chosen, members, *here, part))
    return Places(rows, positions, index, tuple(groups))


def forward_positions(
    model: BlockModel, kv: VersionedKV, tokens: Tensor, places: Places, lengths: Tensor | None, round_number: int
) -> Tensor:
    """Compute hidden states of the positions and write their K and V over the cached ones.

    Every query sees all real positions of its row, the forwarded ones as computed now. Linear layers run on the
    forwarded positions of all rows joined; only attention is padded, to the longest row of a group. ``lengths [R]`` is
    ``None`` where no row has padding: no mask is passed then, which leaves fast kernels free.

    Returns
    -------
    Tensor
        ``[N, H]`` in the order of ``places``.
    """
    rows, positions = places.rows, places.positions
    hidden = model.embed(tokens[rows, positions])
    rotary = model.rotary(positions)
    with _kernels(hidden.device):
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            kv.write(layer, rows, positions, k, v, round_number)
            seen = [_attend_group(q, kv, layer, group, lengths) for group in places.groups]
            hidden = model.finish(layer, hidden, _join(q, places.groups, seen))
    return hidden


def _kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, attention without cuDNN: it prepares a plan for each new shape, and here every round has another."""
    if device.type != "cuda":
        return nullcontext()
    chosen = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    kernels: AbstractContextManager[None] = sdpa_kernel(chosen)
    return kernels


def _attend_group(q: Tensor, kv: VersionedKV, layer: int, group: Group, lengths: Tensor | None) -> Tensor:
    """``[Ng, heads, d]``: attention of a group's positions over all keys of their rows."""
    keys, values = kv.keys[layer], kv.values[layer]
    if group.rows is not None:
        keys, values = keys[group.rows], values[group.rows]
        lengths = None if lengths is None else lengths[group.rows]
    own = q if group.members is None else q[group.members]
    size = (group.part.rows, group.part.longest, *q.shape[1:])
    if group.part.even:
        return attend(own.view(size), keys, values, lengths=lengths).flatten(0, 1)
    queries = q.new_zeros(size)
    queries[group.local, group.slot] = own
    return attend(queries, keys, values, lengths=lengths)[group.local, group.slot]


def _join(q: Tensor, groups: tuple[Group, ...], seen: list[Tensor]) -> Tensor:
    """What the groups saw, in the order of the forward's positions."""
    if len(groups) == 1:
        return seen[0]
    joined = torch.empty_like(q)
    for group, part in zip(groups, seen, strict=True):
        joined[group.members] = part
    return joined


def readable(forwarded: Tensor, *, shifted: bool) -> Tensor:
    """``[R, L]``: positions whose prediction a forward gives; with shifted logits that is the next position's.

    Position 0 has no position before it and keeps its own logits (Dream).
    """
    if not shifted:
        return forwarded
    return torch.cat([forwarded[:, :1], forwarded[:, :-1]], dim=1)


def read_hidden(hidden: Tensor, places: Places, rows: Tensor, positions: Tensor, *, shifted: bool) -> Tensor:
    """Hidden states ``[M, H]`` that predict the tokens at (rows, positions) ``[M]``."""
    source = (positions - 1).clamp_min(0) if shifted else positions
    return hidden[places.index[rows, source]]
