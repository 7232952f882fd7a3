"""The program: launches in the order of issue, with the launches that each must wait for.

Both interpreters follow it: they issue each launch to its stream, let it start when the stream is free and the launches
in ``after`` have ended, and answer a launch that ``decides`` with which rows still hold masked positions. All that a
batch policy means is in here, so simulated and real runs cannot differ in it.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from herald_pipeline.pipeline import Pipeline
from herald_pipeline.scheduling.admission import Admission, Request
from herald_pipeline.stages import (
    Edge,
    LaunchShape,
    LayerLink,
    Mode,
    RowGroup,
    Rows,
    Section,
    Stage,
    launch_shape,
)


class BatchPolicy(StrEnum):
    """When a row that has completed its block goes on."""

    LOCKSTEP = "lockstep"
    """The batch crosses blocks together (the paper's)."""
    FIRST_DONE_FIRST_OUT = "first-done-first-out"
    """A row begins its next block in the next forward; rows at different steps share forwards."""


@dataclass(slots=True, eq=False)
class Launch:
    """One instance of a stage. ``id`` counts from 0 in the order of issue; ``after`` are ids on other streams."""

    id: int
    stage: Stage
    layer: int | None
    groups: tuple[RowGroup, ...]
    shape: LaunchShape
    after: tuple[int, ...]
    block: int
    step: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can run before the next request arrives."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a deciding launch found.

    Attributes
    ----------
    masked
        Slots that still hold masked positions; ``True``: all that were denoised, ``False``: none.
    stopped
        Slots whose answer ends with this block (EOS), asked when their block completes.
    now_ns
        The clock, for arrivals.
    """

    masked: frozenset[int] | bool = False
    stopped: frozenset[int] = frozenset()
    now_ns: int = 0


@dataclass(slots=True, eq=False)
class _Cohort:
    """Rows that began a block together. Lists are in slot order of admission; each row is in one of them."""

    block: int
    slots: tuple[int, ...]
    next_slots: frozenset[int]
    previous: tuple["_Cohort", ...]
    step: int = 0
    open: tuple[int, ...] = ()
    completing: tuple[int, ...] = ()
    memo: dict[object, tuple[tuple[RowGroup, ...], LaunchShape]] = field(default_factory=dict)
    issued: dict[tuple[str, int | None], int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Row:
    """One slot's progress. ``prefix`` is S; ``selected`` and ``tail`` are what the steps of this block read."""

    request: Request
    block: int = -1
    prefix: int = 0
    selected: int = 0
    to_select: int = 0
    tail: int = 0


class Program:
    """Launches of ``requests`` through ``pipeline``; iterate :meth:`launches`."""

    def __init__(
        self,
        pipeline: Pipeline,
        requests: Iterable[Request],
        *,
        slots: int,
        policy: BatchPolicy = BatchPolicy.LOCKSTEP,
        kv_tokens: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.policy = policy
        self._template = pipeline.template
        self._block_length = pipeline.settings.block_length
        self.admission = Admission(requests, slots=slots, block_length=self._block_length, kv_tokens=kv_tokens)
        self._rows: dict[int, _Row] = {}
        self._next_id = 0
        self._counts: dict[str, int] = {}
        self._edges: dict[str, list[Edge]] = {stage.name: [] for stage in self._template.stages()}
        for edge in self._template.edges:
            self._edges[edge.after].append(edge)
        # Of stages whose buffers are reused in turn: index of launch -> id, until it has been waited for.
        self._rings: dict[str, dict[int, int]] = {edge.before: {} for edge in self._template.edges if edge.ring}
        self._orders: dict[int, list[tuple[Stage, int | None]]] = {}

    # The loop --------------------------------------------------------------------------------------------------------

    def launches(self) -> Generator[Launch | Idle, Feedback | None, None]:
        """Yield each launch; after one whose stage ``decides`` the sender must answer with its feedback."""
        cohorts: list[_Cohort] = []
        starting: list[int] = []
        origins: dict[int, _Cohort] = {}
        now_ns = 0
        while True:
            if self.policy is BatchPolicy.FIRST_DONE_FIRST_OUT or not cohorts:
                admitted = self.admission.admit(now_ns)
                if admitted:
                    prompt = self._admit(admitted)
                    yield from self._sections(self._template.prefill, prompt, prompt.slots)
                    origins.update(dict.fromkeys(admitted, prompt))
                    starting += admitted
            if starting:
                cohort = self._begin(starting, origins)
                starting = []
                cohorts.append(cohort)
                feedback = yield from self._head(cohort)
                now_ns = max(now_ns, feedback.now_ns)
            if not cohorts:
                arrival = self.admission.next_arrival_ns
                if arrival is None:
                    return
                now_ns = max(now_ns, arrival)
                yield Idle(arrival)
                continue
            feedback = yield from self._denoise(cohorts)
            now_ns = max(now_ns, feedback.now_ns)
            for cohort in cohorts:
                done = self._advance(cohort, feedback)
                sections = self._template.after_step.get(cohort.step - 1, ())
                yield from self._sections(sections, cohort, cohort.slots)
                if done and (self.policy is BatchPolicy.FIRST_DONE_FIRST_OUT or not _running(cohort)):
                    ended = done if self.policy is BatchPolicy.FIRST_DONE_FIRST_OUT else cohort.slots
                    yield from self._sections(self._template.tail, cohort, ended, feedback.stopped)
                    for slot in ended:
                        origins[slot] = cohort
                        if self._goes_on(slot) and slot not in feedback.stopped:
                            starting.append(slot)
                        else:
                            self._finish(slot)
                            del origins[slot]
            cohorts = [cohort for cohort in cohorts if _running(cohort)]

    def _admit(self, slots: list[int]) -> _Cohort:
        for slot in slots:
            request = self.admission.running[slot]
            row = _Row(request, prefix=request.context)
            row.to_select = self.pipeline.settings.selected_tokens(row.prefix)
            self._rows[slot] = row
        return _Cohort(-1, tuple(slots), frozenset(slots), ())

    def _begin(self, slots: list[int], origins: dict[int, _Cohort]) -> _Cohort:
        settings, lookahead = self.pipeline.settings, self._template.lookahead
        following = []
        for slot in slots:
            row = self._rows[slot]
            row.block += 1
            if row.block:
                row.prefix += self._block_length
            if lookahead:
                row.selected = row.to_select
                row.tail = self._block_length if row.block else 0
            row.to_select = settings.selected_tokens(row.prefix)
            if not lookahead:
                row.selected = row.to_select
            if row.block + 1 < row.request.blocks or row.request.continues:
                following.append(slot)
        previous = tuple(dict.fromkeys(origins[slot] for slot in slots))
        # Two blocks back is never asked for; cutting the chain keeps memory flat.
        for cohort in previous:
            cohort.previous = ()
        block = max(self._rows[slot].block for slot in slots)
        cohort = _Cohort(block, tuple(slots), frozenset(following), previous)
        cohort.open = cohort.slots
        cohort.step = self._template.first_step
        return cohort

    def _goes_on(self, slot: int) -> bool:
        row = self._rows[slot]
        return row.block + 1 < row.request.blocks

    def _finish(self, slot: int) -> None:
        del self._rows[slot]
        self.admission.finish(slot)

    def _advance(self, cohort: _Cohort, feedback: Feedback) -> tuple[int, ...]:
        """Move rows on by one step; returns those whose completing forward this was."""
        done = cohort.completing
        self._split(cohort, feedback)
        cohort.step += 1
        return done

    def _split(self, cohort: _Cohort, feedback: Feedback) -> None:
        masked = feedback.masked
        if masked is True:
            cohort.completing = ()
        elif masked is False or not masked:
            cohort.open, cohort.completing = (), cohort.open
        else:
            still = tuple(slot for slot in cohort.open if slot in masked)
            cohort.completing = tuple(slot for slot in cohort.open if slot not in masked)
            cohort.open = still

    # Launches --------------------------------------------------------------------------------------------------------

    def _head(self, cohort: _Cohort) -> Generator[Launch | Idle, Feedback | None, Feedback]:
        """Sections at the block's begin; a step 0 among them has its answer applied."""
        feedback = Feedback()
        for section in self._template.head:
            answer = yield from self._section(section, cohort, cohort.slots)
            if answer is not None:
                feedback = answer
                self._split(cohort, feedback)
        return feedback

    def _denoise(self, cohorts: Sequence[_Cohort]) -> Generator[Launch | Idle, Feedback | None, Feedback]:
        if len(cohorts) == 1:
            groups, shape = self._running_groups(cohorts[0])
        else:
            groups = tuple(g for cohort in cohorts for g in self._running_groups(cohort)[0])
            shape = launch_shape(groups, self._block_length)
        launch = self._launch(self._template.denoise, None, groups, shape, cohorts)
        feedback = yield launch
        assert feedback is not None, "a deciding launch needs its answer"
        return feedback

    def _running_groups(self, cohort: _Cohort) -> tuple[tuple[RowGroup, ...], LaunchShape]:
        """Row groups of the cohort's next step; steps between which no row changed share them."""
        drafting = cohort.step == self._template.draft_step and bool(cohort.next_slots)
        key = (cohort.open, cohort.completing, drafting)
        known = cohort.memo.get(key)
        if known is not None:
            return known
        groups = []
        for slots, plain, draft in (
            (cohort.open, Mode.DENOISE, Mode.DRAFT),
            (cohort.completing, Mode.COMPLETE, Mode.COMPLETE_DRAFT),
        ):
            drafted = tuple(slot for slot in slots if drafting and slot in cohort.next_slots)
            others = tuple(slot for slot in slots if not drafting or slot not in cohort.next_slots)
            if drafted:
                groups.append(self._group(drafted, draft))
            if others:
                groups.append(self._group(others, plain))
        cohort.memo[key] = found = (tuple(groups), launch_shape(groups, self._block_length))
        return found

    def _group(self, slots: tuple[int, ...], mode: Mode, selecting: bool = False) -> RowGroup:
        rows = [self._rows[slot] for slot in slots]
        return RowGroup(
            slots,
            tuple([row.block for row in rows]),
            mode,
            sum([row.prefix for row in rows]),
            sum([row.to_select if selecting else row.selected for row in rows]),
            0 if selecting else sum([row.tail for row in rows]),
        )

    def _sections(
        self,
        sections: Sequence[Section],
        cohort: _Cohort,
        slots: tuple[int, ...],
        stopped: frozenset[int] = frozenset(),
    ) -> Generator[Launch | Idle, Feedback | None, None]:
        for section in sections:
            yield from self._section(section, cohort, slots, stopped)

    def _section(
        self,
        section: Section,
        cohort: _Cohort,
        slots: tuple[int, ...],
        stopped: frozenset[int] = frozenset(),
    ) -> Generator[Launch | Idle, Feedback | None, Feedback | None]:
        """Issue a section for ``slots``, layer by layer; returns the answer of its deciding launch, if any."""
        answer = None
        shapes = {rows: self._taking(rows, cohort, slots, stopped) for rows in {stage.rows for stage in section.stages}}
        for stage, layer in self._order(section):
            taking = shapes[stage.rows]
            if taking is None:
                continue
            groups, shape = taking
            feedback = yield self._launch(stage, layer, groups, shape, (cohort,))
            if stage.decides:
                answer = feedback
        return answer

    def _taking(
        self, rows: Rows, cohort: _Cohort, slots: tuple[int, ...], stopped: frozenset[int]
    ) -> tuple[tuple[RowGroup, ...], LaunchShape] | None:
        """The rows of ``slots`` that a stage takes, with their totals; ``None`` when there are none."""
        if rows is Rows.NEXT:
            slots = tuple(s for s in slots if s in cohort.next_slots and s not in stopped)
        if not slots:
            return None
        key = ("section", slots)
        if key not in cohort.memo:
            group = self._group(slots, Mode.DENOISE, selecting=True)
            cohort.memo[key] = ((group,), launch_shape((group,), self._block_length))
        return cohort.memo[key]

    def _order(self, section: Section) -> list[tuple[Stage, int | None]]:
        """Launches of a section: layer by layer, then the stages without layers."""
        order = self._orders.get(id(section))
        if order is None:
            layers = sorted({layer for stage in section.stages for layer in stage.layers})
            order = [(stage, at) for at in layers for stage in section.stages if at in stage.layers]
            order += [(stage, None) for stage in section.stages if not stage.layers]
            self._orders[id(section)] = order
        return order

    def _launch(
        self,
        stage: Stage,
        layer: int | None,
        groups: tuple[RowGroup, ...],
        shape: LaunchShape,
        cohorts: Sequence[_Cohort],
    ) -> Launch:
        name = stage.name
        after = self._after(stage, layer, cohorts)
        number = self._next_id
        self._next_id = number + 1
        for cohort in cohorts:
            cohort.issued[name, layer] = number
            if layer is not None:
                cohort.issued[name, None] = number
        count = self._counts.get(name, 0)
        if name in self._rings:
            self._rings[name][count] = number
        self._counts[name] = count + 1
        first = cohorts[0]
        return Launch(number, stage, layer, groups, shape, after, first.block, first.step)

    def _after(self, stage: Stage, layer: int | None, cohorts: Sequence[_Cohort]) -> tuple[int, ...]:
        edges = self._edges[stage.name]
        if not edges:
            return ()
        found: set[int] = set()
        for edge in edges:
            if edge.ring:
                # Each place of the ring is waited for once, so the entry can go.
                index = self._counts.get(stage.name, 0) - edge.ring
                number = self._rings[edge.before].pop(index, None)
                if number is not None:
                    found.add(number)
                continue
            wanted = None if edge.layer is LayerLink.LAST or layer is None else layer
            if edge.layer is LayerLink.PREVIOUS and layer is not None:
                wanted = layer - 1
            for cohort in cohorts:
                if edge.first_only and (stage.name, None) in cohort.issued:
                    continue
                for source in cohort.previous if edge.block_offset else (cohort,):
                    number = source.issued.get((edge.before, wanted))
                    if number is not None:
                        found.add(number)
        return tuple(sorted(found))


def _running(cohort: _Cohort) -> bool:
    return bool(cohort.open or cohort.completing)
