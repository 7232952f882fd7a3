"""Rows and cohorts: how far each request slot is, and the row groups of a launch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from herald_pipeline.scheduling.admission import Request
from herald_pipeline.settings import Settings
from herald_pipeline.stages import LaunchShape, Mode, RowGroup, Rows, launch_shape

Taken = tuple[tuple[RowGroup, ...], LaunchShape]
"""Row groups of a launch and their totals."""


@dataclass(slots=True, eq=False)
class Row:
    """Progress of one slot, or of several that stay alike: admitted together, with equal requests, in lockstep.

    ``prefix`` is S, the completed entries before block ``block``; ``selected`` and ``tail`` are what the steps of the
    block read, ``to_select`` what a selection made during it takes.
    """

    request: Request
    block: int
    prefix: int
    selected: int
    to_select: int
    tail: int

    @classmethod
    def admitted(cls, request: Request, settings: Settings) -> "Row":
        """A row whose prompt is being prefilled (block -1)."""
        return cls(request, -1, request.context, 0, settings.selected_tokens(request.context), 0)

    @property
    def is_last_block(self) -> bool:
        """Whether the request ends with the row's block."""
        return self.block + 1 >= self.request.blocks


@dataclass(slots=True, eq=False)
class Cohort:
    """Rows that began a block together: ``open`` ones still hold masks, ``completing`` ones forward a last time."""

    block: int
    slots: tuple[int, ...]
    next_slots: frozenset[int]
    rows: Mapping[int, Row]
    block_length: int
    previous: tuple[dict[str, int], ...] = ()
    step: int = 0
    open: tuple[int, ...] = ()
    completing: tuple[int, ...] = ()
    issued: dict[str, int] = field(default_factory=dict)
    _totals: tuple[tuple[int, ...], int, int, int, int] | None = None
    _steps: dict[bool, dict[Rows, Taken]] = field(default_factory=dict)
    _taken: dict[tuple[int, ...], Taken] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether any row has a forward before it."""
        return bool(self.open or self.completing)

    def split(self, masked: frozenset[int] | bool) -> None:
        """Apply a step's answer: rows without masked positions complete in the next forward."""
        if masked is True and not self.completing:
            return
        self._steps.clear()
        if masked is True:
            self.completing = ()
        elif not masked:
            self.completing = self.open
            self.open = ()
        else:
            assert isinstance(masked, frozenset)
            before = self.open
            self.open = tuple(slot for slot in before if slot in masked)
            self.completing = tuple(slot for slot in before if slot not in masked)

    def step_groups(self, drafting: bool) -> Mapping[Rows, Taken]:
        """Row groups of the next step, which the running rows take; steps between which no row changed share them."""
        drafting = drafting and bool(self.next_slots)
        known = self._steps.get(drafting)
        if known is None:
            groups = []
            for slots, plain, draft in (
                (self.open, Mode.DENOISE, Mode.DRAFT),
                (self.completing, Mode.COMPLETE, Mode.COMPLETE_DRAFT),
            ):
                drafted = slots if drafting and len(self.next_slots) == len(self.slots) else ()
                if drafting and not drafted:
                    drafted = tuple(slot for slot in slots if slot in self.next_slots)
                others = slots if not drafted else tuple(s for s in slots if s not in self.next_slots)
                groups += [self._group(part, mode) for part, mode in ((drafted, draft), (others, plain)) if part]
            taken = (tuple(groups), launch_shape(groups, self.block_length))
            known = self._steps[drafting] = {Rows.RUNNING: taken}
        return known

    def section_groups(self, slots: tuple[int, ...]) -> Taken:
        """The rows ``slots`` as one group, with what a selection takes from them."""
        known = self._taken.get(slots)
        if known is None:
            group = self._group(slots, Mode.DENOISE, selecting=True)
            known = self._taken[slots] = ((group,), launch_shape((group,), self.block_length))
        return known

    def _group(self, slots: tuple[int, ...], mode: Mode, selecting: bool = False) -> RowGroup:
        if slots is self.slots:
            if self._totals is None:
                self._totals = self._sum(slots)
            blocks, prefix, selected, to_select, tail = self._totals
        else:
            blocks, prefix, selected, to_select, tail = self._sum(slots)
        if selecting:
            return RowGroup(slots, blocks, mode, prefix, to_select, 0)
        return RowGroup(slots, blocks, mode, prefix, selected, tail)

    def _sum(self, slots: Sequence[int]) -> tuple[tuple[int, ...], int, int, int, int]:
        rows = [self.rows[slot] for slot in slots]
        return (
            tuple([row.block for row in rows]),
            sum([row.prefix for row in rows]),
            sum([row.selected for row in rows]),
            sum([row.to_select for row in rows]),
            sum([row.tail for row in rows]),
        )


def begin_block(
    rows: Mapping[int, Row],
    slots: Sequence[int],
    settings: Settings,
    *,
    lookahead: int,
    first_step: int,
    origins: Sequence[Cohort],
) -> Cohort:
    """Move ``slots`` on to their next block and put them into one cohort."""
    block_length = settings.block_length
    selections: dict[int, int] = {}
    # Slots that stay alike share their row: it moves on once.
    moving = dict.fromkeys([rows[slot] for slot in slots])
    for row in moving:
        row.block += 1
        if row.block:
            row.prefix += block_length
        prefix = row.prefix
        selected = selections.get(prefix)
        if selected is None:
            selected = selections[prefix] = settings.selected_tokens(prefix)
        if lookahead:
            # What this block reads was selected during the one before, which stands in the tail.
            row.selected = row.to_select
            row.tail = block_length if row.block else 0
        else:
            row.selected = selected
        row.to_select = selected
    own = tuple(slots)
    # Rows for which something is to be retrieved for a next block.
    following = {row for row in moving if row.request.continues or not row.is_last_block}
    next_slots = frozenset(own if len(following) == len(moving) else [s for s in own if rows[s] in following])
    block = max([row.block for row in moving])
    previous = tuple(cohort.issued for cohort in origins)
    return Cohort(block, own, next_slots, rows, block_length, previous, first_step, open=own)
